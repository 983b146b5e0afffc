"""What becomes of an Accelerate configuration: an experiment config."""
