"""The SQLite file and what lies beside it: looked at, opened, copied, put back."""
