"""Runners that users may use too: a function or a script on N CPU ranks."""
