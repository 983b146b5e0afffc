"""``dstrial doctor``: each module measures and judges one thing; ``proof`` trains.

Nothing here imports torch: ``import_probe`` runs in a process that may hang or crash.
"""
