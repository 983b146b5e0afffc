from __future__ import annotations

from normalization import normalized, with_last_digits_of

ONE, TWO = "6b3c3b0e-6d0f-4a55-8f1e-0d1b2b6f2c11", "00000000-6d0f-4a55-8f1e-0d1b2b6f2c11"


def test_uuids_are_numbered_so_that_equal_ones_stay_equal() -> None:
    assert normalized(f"{ONE} {TWO} {ONE}") == "<uuid 1> <uuid 2> <uuid 1>"


def test_a_time_keeps_its_form_and_a_bare_date_or_other_number_stays() -> None:
    assert normalized("2026-11-22T18:02:39.123456Z") == "<time. Z>"
    assert normalized("2026-11-22T18:02:39+00:00") == "<time zone>"
    assert normalized("2026-11-22 18:02:39") == "<time>"
    assert normalized("2026-11-22 and 20261122 and 1.5") == "2026-11-22 and 20261122 and 1.5"


def test_last_digits_of_a_number_may_differ_and_nothing_else() -> None:
    golden = '{"a": 0.12398548825277252, "b": 1.5, "c": 2.0000001}'

    assert with_last_digits_of(golden, golden.replace("7252", "7154")) == golden
    for other in (
        golden.replace("0.1239", "0.1238"),
        golden.replace("0.12398548825277252", "0.123985499"),
        golden.replace("1.5", "1.6"),
        golden.replace("2.0000001", "2.0000002"),
        golden.replace(', "c": 2.0000001', ""),
    ):
        assert with_last_digits_of(golden, other) == other


def test_the_longer_of_two_literals_is_replaced_first() -> None:
    assert normalized("/tmp/a/b /tmp/a", {"/tmp/a": "scratch", "/tmp/a/b": "state"}) == "<state> <scratch>"


def test_only_numbers_of_measured_keys_are_replaced() -> None:
    text = '{"seconds": 1.5e-3, "steps": 3, "seconds": null, "own_seconds": 2}'

    assert normalized(text, measured=["seconds"]) == (
        '{"seconds": "<measured>", "steps": 3, "seconds": null, "own_seconds": 2}'
    )
    assert normalized('{"seconds":2}', measured=["seconds"]) == '{"seconds":"<measured>"}'
