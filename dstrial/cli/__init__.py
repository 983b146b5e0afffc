"""The ``dstrial`` command: one module per noun, which parses, calls and prints."""
