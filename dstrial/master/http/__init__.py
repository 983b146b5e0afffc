"""HTTP layer of the master: connections, authentication, request limits, errors."""
