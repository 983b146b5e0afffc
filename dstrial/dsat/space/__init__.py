"""The search space: knobs, which values are legal, and which have an effect."""
