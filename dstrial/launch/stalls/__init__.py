"""Ranks that go on no more: seen, asked for stacks, told of, perhaps ended."""
