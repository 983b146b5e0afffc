from __future__ import annotations

import asyncio
import gc

import pytest
from serving import Master


@pytest.mark.process
def test_check_leaves_garbage_collection_enabled(served: Master) -> None:
    """A check that hangs must not leave the whole process without a collector."""
    assert asyncio.run(served.services.check(gc.isenabled))
