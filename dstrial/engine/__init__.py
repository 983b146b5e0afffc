"""How the loop drives DeepSpeed's engines, and how checkpoints keep their state.

Together with the trial files of users, this is the only package that imports DeepSpeed at module level.
It knows engines; it knows nothing of experiments, trials or the loop.
"""
