"""Connect a master to a Ray cluster: reserve slots, run programs on the nodes.

Only functions of ``bridge``, which runs in a separate process, import Ray.
"""
