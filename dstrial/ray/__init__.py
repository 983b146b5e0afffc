"""Ray below the master: state, requests, and bytes of programs on its nodes.

``import ray`` stands in functions of ``bridge`` and ``node_actor`` only, which run in processes of their own.
"""
