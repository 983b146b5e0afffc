"""One read-only page, made on the server: experiments, a plot of each trial's metrics, the end of a log."""

from dstrial.master.web.page import routes

__all__ = ["routes"]
