"""Pausing the garbage collector during imports."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager

import pytest

from dstrial import collector

BOTH = pytest.mark.parametrize("pause", [collector.paused, collector.paused_for_good])


class Cycle:
    """A reference cycle, which only the garbage collector can free."""

    def __init__(self) -> None:
        self.own = self


@pytest.fixture(autouse=True)
def _reset_collector() -> Iterator[None]:
    yield
    gc.unfreeze()
    gc.enable()


@BOTH
@pytest.mark.parametrize("is_enabled", [True, False])
def test_collector_is_restored_and_collects_later_objects(
    pause: Callable[[], AbstractContextManager[None]], is_enabled: bool
) -> None:
    if not is_enabled:
        gc.disable()
    with pytest.raises(ImportError), pause():
        assert not gc.isenabled()
        between = weakref.ref(Cycle())
        raise ImportError
    assert gc.isenabled() is is_enabled
    later = weakref.ref(Cycle())
    gc.collect()
    assert later() is None
    assert (between() is not None) is (pause is collector.paused_for_good)
