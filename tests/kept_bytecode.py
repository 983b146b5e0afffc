"""Let Python keep the bytecode of what tests import, from the first import on, where its environment says otherwise."""

from __future__ import annotations

import sys

# As Python has it at its start, by PYTHONDONTWRITEBYTECODE.
WAS_OFF = sys.dont_write_bytecode
# Until all test files are imported, each by every worker, and what pytest rewrites for the libraries of its plugins.
sys.dont_write_bytecode = False
