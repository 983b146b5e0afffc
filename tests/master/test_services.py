from __future__ import annotations

import gc
import threading

import pytest

from dstrial.master.services import Checker


def test_collections_wait_while_checks_run_and_go_on_afterwards() -> None:
    checker, both = Checker(), threading.Barrier(2, timeout=20)

    def check() -> bool:
        both.wait()
        return gc.isenabled()

    try:
        first, second = checker.submit(check), checker.submit(check)
        assert (first.result(20), second.result(20)) == (False, False)
        checker.submit(lambda: None).result(20)
    finally:
        checker.close()
    assert gc.isenabled()


def test_collections_go_on_after_a_check_that_fails() -> None:
    checker = Checker()
    try:
        with pytest.raises(ZeroDivisionError):
            checker.submit(lambda: 1 // 0).result(20)
    finally:
        checker.close()
    assert gc.isenabled()
