"""The ``dstrial`` command: one module per noun, each of which parses, calls and prints."""
