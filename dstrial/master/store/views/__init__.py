"""Read-only queries that join several tables: lists, searches, overviews."""
