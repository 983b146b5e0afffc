"""Connect a master to a Ray cluster: reservations, and programs on the nodes.

Only functions of ``bridge``, which runs in a separate process, import Ray.
"""
