"""A read-only page made on the server: experiments, metric plots, log ends."""

from dstrial.master.web.page import routes

__all__ = ["routes"]
