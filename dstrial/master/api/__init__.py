"""The protocol's routes: the frame that carries them, and one module per resource, each with a list ``routes``."""
