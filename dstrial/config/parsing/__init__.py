"""Read YAML and JSON: places of keys, scalars as Determined has them, limits."""
