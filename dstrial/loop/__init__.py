"""The training loop of a trial: batches, metrics, validation and checkpoints."""
