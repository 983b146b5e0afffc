"""Test helpers: run a function or script on several CPU ranks; run a master."""
