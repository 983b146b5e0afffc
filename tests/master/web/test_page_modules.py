"""JavaScript modules of the page that need no browser, run by Node.js."""

from __future__ import annotations

import csv
import io
import json
import math
import random
import shutil
import subprocess
from typing import Any

import pytest

from dstrial.master.web.page import STATIC

NODE = shutil.which("node")
pytestmark = [pytest.mark.process, pytest.mark.skipif(NODE is None, reason="Requires: [node]")]


def run(module: str, script: str, given: Any) -> Any:
    """Run JavaScript that sets ``answer`` from ``given``; ``own`` is the module."""
    code = f"""
        import * as own from {json.dumps((STATIC / module).as_uri())};
        import {{ readFileSync }} from "node:fs";
        const given = JSON.parse(readFileSync(0, "utf8"));
        let answer;
        {script}
        console.log(JSON.stringify(answer));
    """
    done = subprocess.run(
        [str(NODE), "--input-type=module", "-e", code],
        input=json.dumps(given),
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def points(count: int) -> list[dict[str, Any]]:
    chance = random.Random(1)
    found: list[dict[str, Any]] = []
    for number in range(count):
        hp = {
            "lr": 10 ** chance.uniform(-5, -1),
            "kind": chance.choice(["a", "b", "c"]),
            "noise": chance.random(),
        }
        found.append(
            {"id": number, "hp": hp, "best": (math.log10(hp["lr"]) + 3) ** 2 + "abc".index(hp["kind"]) * 0.3}
        )
    return found


IMPORTANCE = "answer = own.importance(given, own.varyingAxes(given));"


def test_importance_is_bias_corrected_correlation_ratio_of_ranks() -> None:
    given = points(60)
    found = {one["name"]: one for one in run("hp_space.js", IMPORTANCE, given)}

    order = sorted(given, key=lambda point: point["best"])
    rank = {point["id"]: place for place, point in enumerate(order, 1)}
    by_lr = sorted(given, key=lambda point: point["hp"]["lr"])
    groups = {
        "lr": {point["id"]: place * 5 // 60 for place, point in enumerate(by_lr)},
        "kind": {point["id"]: point["hp"]["kind"] for point in given},
    }
    for name, group_of in groups.items():
        members: dict[Any, list[int]] = {}
        for number, group in group_of.items():
            members.setdefault(group, []).append(rank[number])
        mean = sum(rank.values()) / 60
        total = sum((one - mean) ** 2 for one in rank.values())
        within = sum(sum((one - sum(own) / len(own)) ** 2 for one in own) for own in members.values())
        share = 1 - (within / (60 - len(members))) / (total / 59)
        assert found[name]["share"] == pytest.approx(max(share, 0.0))
    assert found["lr"]["share"] > 0.5 > found["noise"]["share"]


def test_importance_of_too_few_trials_is_null() -> None:
    assert run("hp_space.js", IMPORTANCE, points(19)) is None
    assert run("hp_space.js", IMPORTANCE, [*points(19), {"id": 99, "hp": {}, "best": "NaN"}]) is None
    assert len(run("hp_space.js", IMPORTANCE, points(20))) == 3


def test_axes_are_linear_logarithmic_or_categorical() -> None:
    given = {
        "points": [
            {"id": idx, "best": 1, "hp": {"few": 1 + idx, "wide": 10**idx, "guessed": 10**idx, "flag": idx > 1,
                                          "same": 1, "mixed": "x" if idx else 3, "rare": 5} if idx else {"few": 1, "same": 1}}
            for idx in range(4)
        ],
    }  # fmt: skip
    axes = run(
        "hp_space.js",
        "const last = given.points[3].hp; "
        "answer = own.varyingAxes(given.points).map(({ name, kind, at }) => [name, kind, at(last[name])]);",
        given,
    )
    assert axes == [
        ["few", "linear", 1],
        ["flag", "categorical", 1],
        ["guessed", "log", 1],
        ["mixed", "categorical", 0.5],
        ["rare", "linear", 0.5],
        ["wide", "log", 1],
    ]


def test_csv_export_escapes_formulas() -> None:
    given = ["=1+1", ["=1+1"], ["@x", 2], " =1+1", "\t=1+1", "\r=1+1", "\n+x"]
    kept = ["-1.5", " -1.5", "-Infinity", -1.5, [1, -2], ["a", "=b"], "a=b", None, True, ""]
    text = run("format.js", "answer = own.csv(given.map((one) => [one, 0]));", given + kept)
    cells = [row[0] for row in csv.reader(io.StringIO(text, newline=""))]
    written = ["=1+1", "=1+1", "@x,2", " =1+1", "\t=1+1", "\r=1+1", "\n+x"]
    assert cells[:7] == [f"'{one}" for one in written]
    assert cells[7:] == ["-1.5", " -1.5", "-Infinity", "-1.5", "1,-2", "a,=b", "a=b", "", "true", ""]
