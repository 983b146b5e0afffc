"""Read-only queries that join several tables: lists and overviews."""
