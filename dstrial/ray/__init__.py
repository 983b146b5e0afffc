"""Ray below the master.

That is what a cluster says, what it is asked for, and bytes to and from programs on its nodes. ``import ray`` stands in functions
of ``bridge`` and ``keeper`` only, which run in processes of their own.
"""
