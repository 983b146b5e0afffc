"""What an experiment config says of other systems, as far as it means something here: which webhooks are told of it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dstrial.config.findings import Findings, render

_KEYS = ("webhook_id", "webhook_name", "exclude")


def check_integrations(raw: Mapping[str, Any], findings: Findings) -> None:
    """Check ``integrations.webhooks``; what is said of other systems is kept as it is.

    Source: Determined 0.38.1 schemas/expconf/v0/webhooks.json.
    """
    integrations = raw["integrations"]
    if integrations is None:
        return
    if not isinstance(integrations, Mapping):
        findings.problem(
            "integrations", render(integrations), "a mapping", "Write {webhooks: {webhook_name: [NAME]}}."
        )
        return
    given = integrations.get("webhooks")
    if given is None:
        return
    if not isinstance(given, Mapping):
        findings.problem("integrations.webhooks", render(given), "a mapping", "Write {webhook_name: [NAME]}.")
        return
    where = ("integrations", "webhooks")
    for key in sorted(set(map(str, given)) - set(_KEYS)):
        findings.problem((*where, key), "not a key of webhooks", ", ".join(_KEYS), "Remove it.")
    ids, names, excludes = (given.get(key) for key in _KEYS)
    if ids is not None and not (
        isinstance(ids, list) and all(isinstance(one, int) and not isinstance(one, bool) for one in ids)
    ):
        findings.problem(
            (*where, "webhook_id"), render(ids), "a list of numbers of webhooks", "Write [1], for example."
        )
    if names is not None and not (isinstance(names, list) and all(isinstance(one, str) for one in names)):
        findings.problem(
            (*where, "webhook_name"),
            render(names),
            "a list of names of webhooks",
            "Write [NAME], for example.",
        )
    if excludes is not None and not isinstance(excludes, bool):
        findings.problem((*where, "exclude"), render(excludes), "true or false", "Write true.")
