"""Routes of the REST API: one module per resource, each with a list ``routes``."""
