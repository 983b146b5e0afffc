"""One SQLite file with one writer, and the queries on it by resource."""
