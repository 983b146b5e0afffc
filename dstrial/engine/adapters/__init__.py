"""A common interface to data-parallel and pipeline engines."""
