"""Data loading of a trial: order of records, position, counting of records."""
