"""Loggers of other makers: Weights & Biases, MLflow and Trackio.

They are for the chief of a run. Each works on a thread of its own behind a bounded queue. What fails there is warned of once, and
training goes on.
"""
