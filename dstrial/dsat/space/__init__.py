"""Which configurations a search may try: knobs, what makes them legal, and which differ in effect."""

from dstrial.dsat.space.space import Space, Structure

__all__ = ["Space", "Structure"]
