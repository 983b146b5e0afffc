"""Data loading of a trial: record order, position in the data, record counts."""
