"""How the loop drives DeepSpeed's engines, and how checkpoints keep their state; knows nothing of trials or the loop.

With the trial files of users, this is the only package that imports DeepSpeed at module level.
"""
