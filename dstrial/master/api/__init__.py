"""The protocol's routes: one module per resource, each with a list ``routes``."""
