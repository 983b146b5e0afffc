"""Run allocations on other machines, over a connection to an agent on each."""
