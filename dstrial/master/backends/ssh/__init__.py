"""Allocations on other machines, over one ssh connection each."""
