"""Loggers of the chief: Weights & Biases, MLflow, Trackio, each on a thread."""
