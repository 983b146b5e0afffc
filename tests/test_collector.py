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
def test_the_collector_is_as_it_was_also_after_an_error(
    pause: Callable[[], AbstractContextManager[None]], is_enabled: bool
) -> None:
    if not is_enabled:
        gc.disable()
    with pytest.raises(ImportError), pause():
        assert not gc.isenabled()
        raise ImportError
    assert gc.isenabled() is is_enabled


@BOTH
def test_what_is_made_later_is_collected(pause: Callable[[], AbstractContextManager[None]]) -> None:
    with pause():
        pass
    knot = weakref.ref(Knot())
    gc.collect()
    assert knot() is None


@pytest.mark.parametrize(("pause", "is_kept"), [(collector.paused, False), (collector.paused_for_good, True)])
def test_what_was_made_in_between_is_looked_at_again_or_not(
    pause: Callable[[], AbstractContextManager[None]], is_kept: bool
) -> None:
    with pause():
        knot = weakref.ref(Knot())
    gc.collect()
    assert (knot() is not None) is is_kept
