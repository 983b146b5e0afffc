"""Hostile YAML and JSON texts that are cheap to write and expensive to read.

Tests send them as configs, templates and DeepSpeed JSON. Code generates them, so that no megabytes are committed.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable

MIB = 2**20

SMALL_CONFIG = """\
name: hostile
entrypoint: 'true'
searcher: {name: single, metric: loss, max_length: {batches: 9}}
resources: {slots_per_trial: 0}
"""


@dataclasses.dataclass(frozen=True)
class Hostile:
    """One hostile text.

    Attributes:
        name: description for test reports.
        value: a YAML value for a whole document or for a key; a whole document if ``is_document``.
        says: a regular expression for the error message; None for a legal text, which must only be cheap to read.
        is_document: whether the text is valid only as a whole document.
        is_json: whether the text is sent as JSON too, even if malformed.
    """

    name: str
    value: str
    says: str | None
    is_document: bool = False
    is_json: bool = False

    def below(self, key: str, above: str = SMALL_CONFIG) -> str:
        """Return the config ``above`` with the value under ``key``."""
        return f"{above}{key}:\n  " + self.value.replace("\n", "\n  ") + "\n"


def laughs(num_levels: int, num_aliases: int) -> str:
    """Return nested alias lists that expand to ``num_aliases ** num_levels`` items."""
    levels = ["l0: &l0 [" + ", ".join(["lol"] * num_aliases) + "]"]
    for level in range(1, num_levels):
        levels.append(f"l{level}: &l{level} [" + ", ".join([f"*l{level - 1}"] * num_aliases) + "]")
    return "{" + ",\n ".join(levels) + "}"


def merged(num_levels: int) -> str:
    """Return merged mappings that expand to ``num_levels ** 2 / 2`` keys."""
    levels = ["m0: &m0 {k0: 1}"]
    for level in range(1, num_levels):
        levels.append(f"m{level}: &m{level} {{<<: *m{level - 1}, k{level}: 1}}")
    return "{" + ",\n ".join(levels) + "}"


def stacked(num_levels: int) -> str:
    """Return anchors that each nest the previous anchor forty levels deep."""
    levels = ["s0: &s0 " + "[" * 40 + "]" * 40]
    for level in range(1, num_levels):
        levels.append(f"s{level}: &s{level} " + "[" * 40 + f"*s{level - 1}" + "]" * 40)
    return "{" + ",\n ".join(levels) + "}"


_NODES = r"more than 100000 (values|nodes)"
_DEEP = r"(deeper than|more than) 100|nesting depth"
_LARGE = r"larger than|at most 1048576 bytes"
_NUMBER = r"64 bits|not a valid (int|float)"
_TAG = r"tag"

EXPANDING = (
    Hostile("nine levels of nine aliases", laughs(9, 9), _NODES),
    Hostile("thirty levels of two aliases", laughs(30, 2), _NODES),
    Hostile("4000 merged levels", merged(4000), _DEEP),
    Hostile("a list that holds itself", "&a [1, *a]", "itself"),
    Hostile("a mapping that merges itself", "&a {<<: *a, b: 1}", "itself"),
    Hostile("300000 empty lists", "[" + "[]," * 300_000 + "[]]", _NODES, is_json=True),
)

DEEP = (
    Hostile("20000 brackets", "[" * 20_000 + "]" * 20_000, _DEEP, is_json=True),
    Hostile("20000 open brackets", "[" * 20_000, _DEEP, is_json=True),
    Hostile("20000 braces", '{"a":' * 20_000 + "1" + "}" * 20_000, _DEEP, is_json=True),
    Hostile("101 brackets", "[" * 101 + "]" * 101, _DEEP, is_json=True),
    Hostile("20000 question marks", "? " * 20_000 + "1", _DEEP),
    Hostile("300 levels of blocks", "\n".join(" " * level + f"k{level}:" for level in range(300)), _DEEP),
    Hostile("four anchors forty deep each", stacked(4), _DEEP),
)

LARGE = (
    Hostile("2 MiB of text", '"' + "x" * (2 * MIB) + '"', _LARGE, is_json=True),
    Hostile("2 MiB of comment", "# " + "c" * (2 * MIB) + "\nnull", _LARGE),
    Hostile("1 MiB and a byte of accents", '"' + "é" * (MIB // 2) + '"', _LARGE, is_json=True),
)

SCALARS = (
    Hostile("an integer of 5000 digits", "{a: " + "1" * 5000 + "}", _NUMBER),
    Hostile("a JSON integer of 5000 digits", '{"a": ' + "1" * 5000 + "}", _NUMBER, is_json=True),
    Hostile("a hexadecimal one", "{a: 0x" + "f" * 1_000_000 + "}", _NUMBER),
    Hostile("a hexadecimal number of underscores", "{a: 0x_}", _NUMBER),
    Hostile("a JSON exponent beyond floats", '{"a": 1e999}', _NUMBER, is_json=True),
    Hostile("a word tagged int", "{a: !!int five}", _NUMBER),
    Hostile("a mapping tagged seq", "{a: !!seq {b: 1}}", _TAG),
    Hostile("a Python object", "{a: !!python/object/apply:os.system ['touch owned']}", _TAG),
    Hostile("a Python name", "{a: !!python/name:os.system ''}", _TAG),
    Hostile("a wrong timestamp", "{a: !!timestamp 2026-99-99}", _TAG),
    Hostile(
        "40000 directives",
        "".join(f"%TAG !t{n}! tag:{n}\n" for n in range(40_000)) + "--- 1",
        "directive",
        True,
    ),
)

KEYS = (
    Hostile("a list as key", "{[1]: 2}", "key"),
    Hostile("20000 duplicate keys", "\n".join(["same: 1"] * 20_000), "given twice"),
    Hostile(
        "20000 duplicate keys of JSON", "{" + '"same": 1, ' * 20_000 + '"a": 1}', "given twice", is_json=True
    ),
    Hostile("keys that are equal numbers", "{1: a, 1.0: b, 0x1: c}", "given twice"),
    Hostile("merging a list of numbers", "{<<: [1, 2]}", "merge"),
)

CHARACTERS = (
    Hostile("a NUL", '{a: "\0"}', "character"),
    Hostile("an escaped NUL in a key", r'{"b\u0000c": 1}', "NUL", is_json=True),
    Hostile("half a surrogate", r'{"a": "\ud800"}', "Unicode|surrogate", is_json=True),
    Hostile("an undefined alias", "{a: *none}", "alias|anchor"),
    Hostile("an open quote", '{a: "' + 'x\\"' * 100_000, "not YAML"),
    Hostile("100000 documents", "--- 1\n" * 100_000, "document", is_document=True),
    Hostile("a byte order mark first", "\ufeff" + SMALL_CONFIG, None, is_document=True),
)

TEXTS = (*EXPANDING, *DEEP, *LARGE, *SCALARS, *KEYS, *CHARACTERS)
"""Every hostile text."""


def _with(text: str) -> Callable[[], str]:
    """Return a function that returns the small config with more lines."""
    return lambda: SMALL_CONFIG + text


def _searched(searcher: str, hyperparameters: Callable[[], dict[str, object]]) -> Callable[[], str]:
    """Return a function that returns a config with this searcher."""
    return lambda: (
        "name: hostile\nentrypoint: 'true'\nresources: {slots_per_trial: 0}\n"
        f"searcher: {{metric: loss, {searcher}}}\nhyperparameters: {json.dumps(hyperparameters())}\n"
    )


def _axes(count: int) -> dict[str, object]:
    return {f"k{axis}": {"type": "double", "minval": 0, "maxval": 1, "count": count} for axis in range(9000)}


_SOME = "max_length: {batches: 9}"

CONFIGS: dict[str, tuple[Callable[[], str], str | None]] = {
    "45000 hyperparameters": (
        _with("hyperparameters: {" + ", ".join(f"k{n}: {n}" for n in range(45_000)) + "}"),
        None,
    ),
    "12000 search spaces": (_searched(f"name: random, max_trials: 4, {_SOME}", lambda: _axes(3)), None),
    "a grid of 10**81000 points": (
        _searched(f"name: grid, {_SOME}", lambda: _axes(10**9)),
        "a grid of more than 1000000000 points",
    ),
    "10**9 random trials at once": (
        _searched(f"name: random, max_trials: 1000000000, max_concurrent_trials: 1000000000, {_SOME}", dict),
        "at most 10000",
    ),
    "40000 wrong keys of the config": (
        _with("".join(f"max_restart{n}: 1\n" for n in range(40_000))),
        "at least 100 places",
    ),
    "40000 wrong DeepSpeed keys": (
        _searched(
            f"name: single, {_SOME}", lambda: {"deepspeed_config": {f"k{n}": 1 for n in range(40_000)}}
        ),
        "at least 100 places",
    ),
    "20000 DeepSpeed configs": (
        _searched(
            f"name: single, {_SOME}",
            lambda: {f"e{n}_deepspeed_config": {"train_batch_size": 1} for n in range(20_000)},
        ),
        "at most 20 engines",
    ),
    "20000 log policies": (
        _with("log_policies: [" + ", ".join(f"{{pattern: a{n}}}" for n in range(20_000)) + "]"),
        "at most 100 items",
    ),
    "45000 environment variables": (
        _with(
            "environment: {environment_variables: [" + ", ".join(f"A{n}={n}" for n in range(45_000)) + "]}"
        ),
        None,
    ),
    "a pattern of 900 KB": (_with("log_policies: [{pattern: '" + "[a-z]" * 180_000 + "'}]"), "pattern"),
    "an entrypoint of 900 KB": (
        lambda: SMALL_CONFIG.replace("entrypoint: 'true'", "entrypoint: " + "x" * 900_000),
        "65536",
    ),
    "a number without end": (
        _with("hyperparameters: {a: .inf, b: 123456789012345678901234567890}"),
        "64 bits",
    ),
}
"""Builders of expensive configs by name, with the error message or None if valid."""
