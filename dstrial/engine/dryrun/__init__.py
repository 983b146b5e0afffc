"""Run DeepSpeed as one of any number of virtual ranks, on a CPU with fake tensors.

``values`` defines requests and results. ``process.dry_run`` runs one request in a child process. These two modules do not
import torch; the other modules run inside the child process.
"""
