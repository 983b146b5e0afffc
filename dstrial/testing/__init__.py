"""Test helpers, also for users: run a function or script on several CPU ranks."""
