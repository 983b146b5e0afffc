"""The training loop, its boundaries, metrics, validation and checkpoints."""
