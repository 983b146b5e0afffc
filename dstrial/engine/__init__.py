"""Train with DeepSpeed engines; save and load their state.

Apart from user trials, only this package imports DeepSpeed at module level.
"""
