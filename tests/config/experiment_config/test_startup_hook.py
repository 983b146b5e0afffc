"""What a config says of installations."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from dstrial.config.experiment_config.config import load_experiment
from dstrial.config.experiment_config.dstrial_section import may_install, requirements_of
from dstrial.errors import ConfigError


def experiment(directory: Path, hook: str = "", **sections: Any) -> Path:
    given = {
        "name": "x",
        "entrypoint": "python3 train.py",
        "searcher": {"name": "single", "metric": "loss", "max_length": {"batches": 1}},
        **sections,
    }
    (directory / "exp.yaml").write_text(yaml.safe_dump(given))
    (directory / "train.py").write_text("print(1)\n")
    if hook:
        (directory / "startup-hook.sh").write_text(hook)
    return directory / "exp.yaml"


@pytest.mark.parametrize(
    ("sections", "place"),
    [
        ({"environment": {"requirements": "needs.txt"}}, "environment.requirements"),
        ({"data": {"dstrial": {"requirements": "needs.txt"}}}, "data.dstrial.requirements"),
    ],
)
def test_requirements_are_a_file_of_the_model_definition(
    tmp_path: Path, sections: dict[str, Any], place: str
) -> None:
    path = experiment(tmp_path, **sections)
    with pytest.raises(ConfigError, match=f'{place} is "needs.txt", which is not there'):
        load_experiment(path, tmp_path)
    (tmp_path / "needs.txt").touch()

    assert requirements_of(load_experiment(path, tmp_path).raw) == "needs.txt"


@pytest.mark.parametrize("name", ["/etc/passwd", "../needs.txt", 3])
def test_requirements_elsewhere_are_refused(tmp_path: Path, name: Any) -> None:
    with pytest.raises(ConfigError, match=r"data\.dstrial\.requirements"):
        load_experiment(experiment(tmp_path, data={"dstrial": {"requirements": name}}), tmp_path)


def test_two_names_of_requirements_that_differ_are_refused(tmp_path: Path) -> None:
    (tmp_path / "a.txt").touch()
    sections = {"environment": {"requirements": "a.txt"}, "data": {"dstrial": {"requirements": "b.txt"}}}

    with pytest.raises(ConfigError, match="Keep one of the two"):
        load_experiment(experiment(tmp_path, **sections), tmp_path)


def test_a_config_without_requirements_is_stored_without_the_key(tmp_path: Path) -> None:
    assert "requirements" not in load_experiment(experiment(tmp_path), tmp_path).raw["environment"]


def test_what_installs_is_told_from_what_does_not() -> None:
    assert may_install("sh -c 'pip install humanize && python train.py'")
    assert may_install("uv pip sync needs.txt")
    assert may_install("python setup.py develop")
    assert not may_install("export FROM_HOOK=1")
    assert not may_install("python train.py --pipeline install")
