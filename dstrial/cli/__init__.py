"""The ``dstrial`` command: one module per subcommand, without business logic."""
