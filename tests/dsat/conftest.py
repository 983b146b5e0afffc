"""Lets pytest add this directory to ``sys.path``, for modules shared by tests."""
