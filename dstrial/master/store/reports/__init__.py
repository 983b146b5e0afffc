"""High-volume reports of trials, with size limits: metrics and log lines."""
