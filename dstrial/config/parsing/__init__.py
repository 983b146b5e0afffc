"""Reading YAML and JSON: places of keys, scalars as Determined reads them, and limits."""
