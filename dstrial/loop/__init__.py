"""The training loop: one progress counter, pure boundaries, metrics reduced once, validation, checkpoints."""
