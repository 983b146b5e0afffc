"""Checks that DeepSpeed itself makes only after the ranks have started."""
