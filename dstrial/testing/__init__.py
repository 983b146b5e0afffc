"""Run a function or a script on several CPU ranks, for tests of users too."""
