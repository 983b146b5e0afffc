"""Runs a search: asks the method, starts trials, takes results, writes the record."""

from dstrial.dsat.driver.driver import Driver

__all__ = ["Driver"]
