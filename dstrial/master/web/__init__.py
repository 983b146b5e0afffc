"""Server side of the read-only web page: experiments, metrics, logs, cluster."""
