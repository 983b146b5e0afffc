"""Write bytecode files during test collection despite PYTHONDONTWRITEBYTECODE."""

from __future__ import annotations

import sys

# Whether PYTHONDONTWRITEBYTECODE disabled bytecode files; conftest.py restores this state.
WAS_OFF = sys.dont_write_bytecode
# Every pytest-xdist worker imports all test files, so cached bytecode saves time.
sys.dont_write_bytecode = False
