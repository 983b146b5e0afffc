"""A read-only page made on the server: experiments, metric plots, log ends."""
