"""The picture of many curves is drawn in parts, and is the same as one that is drawn at once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from browsing import Browser

pytestmark = pytest.mark.process

SETTING = """
    const { CurvePicture } = await import("/page/assets/parts/curve_picture.js");
    const canvas = document.createElement("canvas");
    [canvas.width, canvas.height] = [300, 150];
    const ctx = canvas.getContext("2d", { willReadFrequently: true });
    const all = Array.from({ length: 400 }, (_, idx) => ({
        id: idx, colour: idx, label: "", isBest: idx === 7,
        xs: Array.from({ length: 200 }, (_, at) => at),
        ys: Array.from({ length: 200 }, (_, at) => (at === 50 ? NaN : Math.sin(at / (9 + idx / 40)) + idx / 300)),
    }));
    const look = (given) => ({ bbox: { left: 20, top: 10, width: 270, height: 120 }, minX: 0, maxX: 199, minY: -1, maxY: 2.4,
        isLog: false, isMany: true, isScatter: false, ratio: 1, palette: ["#1f5fd0", "#b4460f", "#1a7f5a"], best: "#b00040",
        muted: "#555555", ...given });
    const frame = (picture, curves, given = {}, isWhole = false) => {
        ctx.clearRect(0, 0, 300, 150);
        return picture.show(ctx, curves, look(given), 1, isWhole);
    };
    const drawn = (picture, curves, given = {}) => {
        let num = 1;
        while (!frame(picture, curves, given)) num += 1;
        return num;
    };
    const pixels = () => ctx.getImageData(0, 0, 300, 150).data.join();
    const num_inked = () => ctx.getImageData(0, 0, 300, 150).data.filter((_, at) => at % 4 === 3 && _ > 0).length;
"""


@pytest.fixture
def run(open_browser: Callable[..., Browser]) -> Callable[[str], Any]:
    """Give what runs JavaScript beside the module."""
    browser = open_browser()
    browser.page.route(
        "**/bare", lambda route: route.fulfill(body="<!doctype html>", content_type="text/html")
    )
    browser.page.route("**/favicon.ico", lambda route: route.fulfill(status=204))
    browser.page.goto(f"{browser.address}/bare")
    return lambda script: browser.page.evaluate(f"async () => {{ {SETTING} {script} }}")


def test_a_picture_in_parts_is_the_one_drawn_at_once(run: Callable[[str], Any]) -> None:
    num_frames, is_whole, is_same = run(
        """const num = drawn(new CurvePicture(), all); const parts = pixels();
        const isWhole = frame(new CurvePicture(), all, {}, true); return [num, isWhole, pixels() === parts];"""
    )
    assert num_frames > 2
    assert is_whole
    assert is_same


def test_curves_that_come_later_are_drawn_alone_and_below_the_best(run: Callable[[str], Any]) -> None:
    first, later, again, is_same = run(
        """const picture = new CurvePicture();
        const first = drawn(picture, all.slice(0, 390)); const later = drawn(picture, all); const grown = pixels();
        const again = drawn(picture, all); drawn(new CurvePicture(), all);
        return [first, later, again, pixels() === grown];"""
    )
    assert first > 2
    assert (later, again) == (1, 1)
    assert is_same


@pytest.mark.parametrize(
    "changed",
    ["{}", "{ minX: 40, maxX: 90 }", '{ palette: ["#000000"] }', "{ isLog: true, minY: -2, maxY: 0.4 }"],
)
def test_what_is_another_look_or_without_some_curves_is_drawn_anew(
    run: Callable[[str], Any], changed: str
) -> None:
    assert run(
        f"""const picture = new CurvePicture();
        drawn(picture, all); drawn(picture, all.slice(5), {changed}); const anew = pixels();
        drawn(new CurvePicture(), all.slice(5), {changed}); return pixels() === anew;"""
    )


def test_the_picture_before_stands_for_one_that_is_not_whole(run: Callable[[str], Any]) -> None:
    before, moved, is_done, whole = run(
        """const picture = new CurvePicture(); drawn(picture, all); const before = num_inked();
        const isDone = frame(picture, all, { maxX: 398 }); const moved = num_inked();
        drawn(picture, all, { maxX: 398 }); return [before, moved, isDone, num_inked()];"""
    )
    assert not is_done
    # As many points in half the width: what is shown meanwhile is about what it becomes.
    assert moved < 0.7 * before
    assert abs(moved - whole) < 0.1 * whole
