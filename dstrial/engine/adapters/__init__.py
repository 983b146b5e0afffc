"""One interface to data-parallel and pipeline engines."""
