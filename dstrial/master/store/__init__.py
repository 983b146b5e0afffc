"""The master's SQLite database (one writer thread), and queries by resource."""
