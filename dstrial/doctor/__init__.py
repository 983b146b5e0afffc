"""``dstrial doctor``: one module per check of the machine; ``proof`` trains.

The command does not import torch: ``import_probe`` does, in a separate process that may hang or crash.
"""
