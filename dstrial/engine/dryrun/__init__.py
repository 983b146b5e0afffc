"""Run the real engine at any number of ranks on a CPU, without real memory.

``values`` has request and result, ``process.dry_run`` runs a request in a process of its own; both import no torch. The other
modules run inside that process.
"""
