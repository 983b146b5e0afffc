"""The adapters between the training loop and DeepSpeed's engines, and how their state lies in a checkpoint.

Together with the trial files of users, this is the only package that imports DeepSpeed at module level.
It knows engines; it knows nothing of experiments, trials or the loop.
"""
