"""Processes that belong to no trial: what ``det`` calls commands, TensorBoards and generic tasks."""
