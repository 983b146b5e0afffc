"""Loggers for Weights & Biases, MLflow and Trackio, each on a thread of rank 0."""
