"""Ray below the master: state, requests, and bytes of programs on its nodes.

``import ray`` stands in functions of ``bridge`` and ``keeper`` only, which run in processes of their own.
"""
