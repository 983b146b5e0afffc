"""Run the real engine at any number of ranks on a CPU, without real memory.

``values`` defines requests and results. ``process.dry_run`` runs one request in a child process. These two modules do not
import torch; the other modules run inside the child process.
"""
