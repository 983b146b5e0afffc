"""Server side of the web page, which shows experiments, metrics, logs and cluster."""
