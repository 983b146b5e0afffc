"""How the loop drives DeepSpeed's engines, and how checkpoints keep their state.

With the trial files of users, this is the only package that imports DeepSpeed at module level.
"""
