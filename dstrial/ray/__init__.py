"""Ray below the master: state, requests, and bytes of programs on its nodes.

``import ray`` stands in functions of ``bridge`` only, which runs in a process of its own.
"""
