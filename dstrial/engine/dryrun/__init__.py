"""Dry-run a model: measure one of many virtual ranks on a CPU with fake tensors.

A dry run executes some steps of DeepSpeed, and returns their memory and FLOPs. ``values`` defines requests and results.
``process.dry_run`` runs one request in a child process. These two modules do not import torch; the other modules run inside the
child process.
"""
