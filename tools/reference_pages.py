"""Write the generated pages of docs/reference: experiment config, settings of the master, command line.

    python tools/reference_pages.py

``tests/config/test_json_schema.py`` compares the pages with the tables and parsers that they are made from.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

from dstrial.cli.app import COMMANDS, build_parser
from dstrial.config.keys import json_schema
from dstrial.config.schema import EXPERIMENT
from dstrial.master.settings import SETTINGS

FOLDER = Path(__file__).parents[1] / "docs" / "reference"

_HEAD = """\
# The experiment config

This page lists every key of an experiment config, as `dstrial check` knows it: version 0 of Determined's config, and
`data.dstrial` for settings of dstrial. A key that is null counts as not given. [Train](../how-to/training.md) says which keys
`dstrial run` uses; [a shared master](../how-to/shared-master.md) adds defaults of its own.

An editor that supports JSON Schema, such as VS Code with the YAML extension, completes and checks the keys while you write.
Save the schema with `dstrial check --schema > experiment-config.schema.json`, and start the config with:

    # yaml-language-server: $schema=experiment-config.schema.json
"""
_SETTINGS_HEAD = """\
# Settings of the master

Every key of the file that `dstrial up --config-file FILE` reads. Without a file all defaults apply. `det -u admin master config`
shows the settings of a running master.

"""
_COMMANDS_HEAD = """\
# The command line

Every command of `dstrial` with its options, as `dstrial COMMAND --help` prints them. The commands exit with 0 on success, 1 on a
user's error, 2 on wrong usage, and 130 after Ctrl-C.

| command | |
|---|---|
"""
_ROW = "| key | type | default | |\n|---|---|---|---|\n"


def rows(schema: dict[str, Any], prefix: str = "") -> Iterator[str]:
    """Yield a table row for each key below a part of the schema."""
    for key, value in schema["properties"].items():
        default = f"`{json.dumps(value['default'])}`" if "default" in value else ""
        yield f"| `{prefix}{key}` | {_type(value)} | {default} | {value.get('description', '')} |\n"
        if "properties" in value and "batches" not in value["properties"]:  # a length is no section
            yield from rows(value, f"{prefix}{key}.")
        elif "properties" in value.get("items", {}):
            yield from rows(value["items"], f"{prefix}{key}[].")


def _type(value: dict[str, Any]) -> str:
    if "enum" in value:
        return ", ".join(f"`{one}`" for one in value["enum"] if one is not None)
    bounds = {
        "at least": value.get("minimum"),
        "above": value.get("exclusiveMinimum"),
        "at most": value.get("maximum"),
    }
    words = {"array": "list", "object": "mapping"}
    kinds = " or ".join(words.get(one, one) for one in value.get("type", ["any"]) if one != "null")
    return ", ".join([kinds, *(f"{word} {bound}" for word, bound in bounds.items() if bound is not None)])


def experiment_config() -> str:
    """Return the page of the experiment config."""
    schema = json_schema(EXPERIMENT, "")
    parts = [_HEAD]
    properties = schema["properties"]
    sections = [key for key in properties if "properties" in properties[key] and not key.startswith("min_")]
    single = {key: value for key, value in properties.items() if key not in sections}
    parts.append(f"\n## Top level\n\n{_ROW}{''.join(rows({'properties': single}))}")
    for key in sections:
        text = properties[key]["description"]
        table = "".join(rows(properties[key], f"{key}."))
        parts.append(f"\n## `{key}`\n\n{text[:1].upper()}{text[1:]}.\n\n{_ROW}{table}")
    return "".join(parts)


def master_settings() -> str:
    """Return the page of the master's settings file."""
    return f"{_SETTINGS_HEAD}{_ROW}{''.join(rows(json_schema(SETTINGS, '')))}"


def command_line() -> str:
    """Return the page of all commands."""
    parts = [
        _COMMANDS_HEAD,
        *(f"| [`dstrial {name}`](#dstrial-{name}) | {text} |\n" for name, text in COMMANDS.items()),
    ]
    for name in COMMANDS:
        parts += _sections((name,))
    return "".join(parts)


def _sections(words: tuple[str, ...]) -> Iterator[str]:
    text = help_of(*words)
    yield f"\n{'#' * (len(words) + 1)} dstrial {' '.join(words)}\n\n```text\n{text.strip()}\n```\n"
    if re.search(r" (ACTION|TOOL) \.\.\.", text):
        actions = re.findall(
            r"^    ([a-z][a-z-]*)(?:\s|$)", text.partition("options:")[0], flags=re.MULTILINE
        )
        for action in actions:
            yield from _sections((*words, action))


def help_of(*words: str) -> str:
    """Return what ``dstrial WORDS --help`` prints at 100 columns."""
    printed = io.StringIO()
    with (
        mock.patch.dict(os.environ, {"COLUMNS": "100", "NO_COLOR": "1"}),
        contextlib.redirect_stdout(printed),
        contextlib.suppress(SystemExit),
    ):
        build_parser(words[0]).parse_args([*words, "--help"])
    return printed.getvalue()


PAGES = {
    "experiment-config.md": experiment_config,
    "master-settings.md": master_settings,
    "command-line.md": command_line,
}


if __name__ == "__main__":
    for name, page in PAGES.items():
        (FOLDER / name).write_text(page(), encoding="utf-8")
