"""``dstrial doctor``: checks of the machine; ``proof`` trains.

The command itself does not import torch. A separate process, ``import_probe``, does; it may hang or crash.
"""
