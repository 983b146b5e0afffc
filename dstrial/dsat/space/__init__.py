"""What a search may try: knobs, their legality, and which of them have effect."""

from dstrial.dsat.space.space import Space, Structure

__all__ = ["Space", "Structure"]
