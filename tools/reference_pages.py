"""Write docs/reference/experiment-config.md from the table of the experiment config.

    python tools/experiment_config_page.py > docs/reference/experiment-config.md

``tests/config/test_json_schema.py`` compares the page with the table.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from typing import Any

from dstrial.config.json_schema import experiment_schema

_HEAD = """\
# The experiment config

Every key of an experiment config, as `dstrial check` knows it: Determined's version 0, with `data.dstrial` for settings of our
own. A key that is null counts as not given. [Training](../how-to/training.md) says which keys `dstrial run` uses, and
[the master](../how-to/master.md) adds defaults of its own. This page is written by `tools/experiment_config_page.py`.

An editor that knows JSON Schema (VS Code with the YAML extension, for example) completes and checks the keys while you write.
Save the schema with `dstrial check --schema > experiment-config.schema.json`, and begin the config with:

    # yaml-language-server: $schema=experiment-config.schema.json
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


def page() -> str:
    """Return the page."""
    schema = experiment_schema()
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


if __name__ == "__main__":
    sys.stdout.write(page())
