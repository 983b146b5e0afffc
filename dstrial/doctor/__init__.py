"""``dstrial doctor``: checks of the machine, grouped by what they look at; ``proof`` trains.

The command itself does not import torch. A separate process, ``import_probe``, does; it may hang or crash.
"""
