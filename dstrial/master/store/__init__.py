"""The SQLite database with its single writer thread, and queries by resource."""
