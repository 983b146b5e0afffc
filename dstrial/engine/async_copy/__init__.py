"""A copy of an engine's state, taken while training goes on."""
