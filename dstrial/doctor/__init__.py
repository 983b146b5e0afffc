"""Check the machine for ``dstrial doctor``; ``proof`` also tests training.

The command does not import torch, which may hang or crash; the separate process ``import_probe`` does.
"""
