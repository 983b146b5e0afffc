"""Ranks that go on no more: seen, asked for their stacks, told of, and ended where that is configured."""
