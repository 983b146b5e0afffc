"""Round trip of every experiment config field: submitted, completed, in the trial.

Secrets are the exception: only the trial sees them, and the API masks them.
"""

from __future__ import annotations

import copy
import dataclasses
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml
from submitting import wait_until

from dstrial.config.keys import Section
from dstrial.config.schema import EXPERIMENT
from dstrial.testing.master import MasterForTest

RECORD = 'printf \'{"config": %s, "hparams": %s, "variables": %s}\' "$DET_EXPERIMENT_CONFIG" "$DET_HPARAMS" '
RECORD += '"\\"$A\\"" > "$0.$DET_TRIAL_ID"'


_TABLE = yaml.safe_load(Path(__file__).with_name("config_cases.yaml").read_text())
DEFAULTS: dict[str, Any] = _TABLE["defaults"]


@dataclasses.dataclass(frozen=True)
class Case:
    """An experiment config and the expected result.

    Attributes:
        given: the submitted fields, in addition to name, entrypoint, searcher and seed, which have defaults here.
        also: completed fields that are neither submitted nor defaults; ``environment`` and ``resources`` are filled by defaults.
        hparams: hyperparameters that the first trial sees, if these are not the submitted constants.
        template: config template to which the submitted config is applied.
    """

    given: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    also: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    hparams: Mapping[str, Any] | None = None
    template: Mapping[str, Any] | None = None

    def completed(self, submitted: Mapping[str, Any], host_path: str) -> dict[str, Any]:
        """Return the expected effective config: submitted fields over the defaults."""
        expected = copy.deepcopy(DEFAULTS)
        expected["searcher"] = _TABLE["searchers"][submitted["searcher"]["name"]]
        expected["checkpoint_storage"] = {**_TABLE["shared_fs"], "host_path": host_path}
        for key, value in submitted.items():
            below = expected.get(key)
            is_section = isinstance(below, dict) and isinstance(value, Mapping) and not key.startswith("min_")
            expected[key] = {**below, **value} if is_section and below is not None else value
        for key, value in self.also.items():
            is_filled = key in ("environment", "resources")
            expected[key] = {**DEFAULTS[key], **value} if is_filled else value
        return copy.deepcopy(expected)


CASES = {name: Case(**fields) for name, fields in _TABLE["cases"].items()}


@dataclasses.dataclass(frozen=True)
class Outcome:
    """A case, its submitted config, and the configs that the API and the trial show."""

    case: Case
    given: dict[str, Any]
    text: str
    shown: dict[str, Any]
    seen: dict[str, Any]


@pytest.fixture(scope="module")
def outcomes(shared_master: MasterForTest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Outcome]:
    """Outcome of every case; each was submitted and run by a trial that records it."""
    directory = tmp_path_factory.mktemp("seen")
    client = shared_master.client()
    submitted: dict[str, tuple[int, dict[str, Any], str, Path]] = {}
    for number, (name, case) in enumerate(CASES.items()):
        path = directory / str(number)
        given = {
            "name": name,
            "entrypoint": ["sh", "-c", RECORD, str(path)],
            "searcher": {"name": "single", "metric": "loss"},
            "reproducibility": {"experiment_seed": number},
            **case.given,
        }
        text = f"# {name}\n{yaml.safe_dump(given, sort_keys=False)}"
        body: dict[str, Any] = {"config": text, "activate": True}
        if case.template is not None:
            body["template"] = f"of case {number}"
            template = {"name": body["template"], "config": case.template, "workspaceId": 0}
            client.post(f"/api/v1/templates/of%20case%20{number}", template)
        made = client.post("/api/v1/experiments", body)["experiment"]
        submitted[name] = (made["id"], given, text, path)
    found = {}
    for name, (experiment_id, given, text, path) in submitted.items():
        shown = wait_until(shared_master, experiment_id, "COMPLETED", deadline_s=120)
        (trial, *_) = client.get(f"/api/v1/experiments/{experiment_id}/trials")["trials"]
        seen = json.loads(Path(f"{path}.{trial['id']}").read_text())
        found[name] = Outcome(CASES[name], given, text, shown, seen)
    return found


def _without_seen_storage(config: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in config.items() if key != "checkpoint_storage"}


@pytest.mark.process
@pytest.mark.parametrize("name", CASES)
def test_config_survives_round_trip(
    outcomes: dict[str, Outcome], shared_master: MasterForTest, name: str
) -> None:
    one = outcomes[name]
    host_path = str(shared_master.state.path / "checkpoints")
    completed = one.case.completed(one.given, host_path)

    if _as_shown(one.given) == one.given:
        assert one.shown["originalConfig"] == one.text
    else:
        assert yaml.safe_load(one.shown["originalConfig"]) == _as_shown(one.given)
    assert one.shown["config"] == _as_shown(completed)
    assert _without_seen_storage(one.seen["config"]) == _without_seen_storage(completed)
    storage, seen = completed["checkpoint_storage"], one.seen["config"]["checkpoint_storage"]
    if storage["type"] == "shared_fs":
        path = "/".join(part for part in (storage["host_path"], storage["storage_path"]) if part)
        kept = {key: value for key, value in storage.items() if key.startswith("save_")}
        assert seen == {"type": "directory", "container_path": path, **kept}
    else:
        assert seen == storage
    if one.case.hparams:
        assert one.seen["hparams"] == one.case.hparams
    assert one.seen["variables"] == next(
        (text[2:] for text in completed["environment"]["environment_variables"]["cpu"] if text[:2] == "A="),
        "",
    )


SECRETS = (
    ("checkpoint_storage", "access_key"),
    ("checkpoint_storage", "secret_key"),
    ("checkpoint_storage", "connection_string"),
    ("checkpoint_storage", "credential"),
    ("environment", "registry_auth", "password"),
)


def _as_shown(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy of a config in which secrets are masked as in API responses."""
    shown = copy.deepcopy(dict(config))
    for *outer, last in SECRETS:
        section: Any = shown
        for key in outer:
            section = section.get(key) if isinstance(section, dict) else None
        if isinstance(section, dict) and section.get(last) is not None:
            section[last] = "********"
    return shown


def _paths(section: Section, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    for key, rule in section.keys.items():
        if rule.section is not None and rule.section.fills_in:
            yield from _paths(rule.section, (*path, key))
        else:
            yield (*path, key)


def _is_given(config: Any, path: tuple[str, ...]) -> bool:
    for key in path:
        config = config.get(key) if isinstance(config, Mapping) else None
    return config is not None


def test_cases_cover_every_config_field() -> None:
    everywhere = {
        ("name",),
        ("entrypoint",),
        ("searcher", "name"),
        ("searcher", "metric"),
        ("reproducibility", "experiment_seed"),
    }
    # Tested elsewhere: warm starts need a trained trial.
    elsewhere = {
        ("searcher", "source_trial_id"),
        ("searcher", "source_checkpoint_uuid"),
    }
    missing = {
        path for path in _paths(EXPERIMENT) if not any(_is_given(case.given, path) for case in CASES.values())
    }
    assert missing - everywhere == elsewhere
