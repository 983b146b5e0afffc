"""Loggers for Weights & Biases and MLflow, each on a thread of rank 0."""
