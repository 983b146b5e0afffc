"""The collector stands still during imports, is as it was afterwards, and finds what is made later."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager

import pytest

from dstrial import collector

BOTH = pytest.mark.parametrize("pause", [collector.paused, collector.paused_for_good])


class Knot:
    """Refers to itself, so that only the collector can find it."""

    def __init__(self) -> None:
        self.own = self


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
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
        between = weakref.ref(Knot())
        raise ImportError
    assert gc.isenabled() is is_enabled
    later = weakref.ref(Knot())
    gc.collect()
    assert later() is None
    assert (between() is not None) is (pause is collector.paused_for_good)
