"""What a config says of installations, and what a startup hook cannot do."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from dstrial.cli.app import main
from dstrial.config import load_experiment
from dstrial.config.experiment_config.startup_hook import may_install, requirements_of, unsupported
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
    ("hook", "named"),
    [
        ("apt-get update && apt-get install -y git", "startup-hook.sh:1: apt-get"),
        ("set -x\nsudo apt install git", "startup-hook.sh:2: apt"),
        ("conda install -c conda-forge faiss", "startup-hook.sh:1: conda"),
        ("pip install --user humanize", "startup-hook.sh:1: pip install --user"),
        (
            "python3 -m pip --quiet install \\\n  --target=lib humanize",
            "startup-hook.sh:1: pip install --target",
        ),
        ("uv pip install humanize", "startup-hook.sh:1: uv"),
        ("pip3.11 install -t lib humanize", "startup-hook.sh:1: pip install -t"),
    ],
)
def test_check_warns_of_what_a_hook_cannot_do(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], hook: str, named: str
) -> None:
    assert main(["check", str(experiment(tmp_path, hook)), str(tmp_path)]) == 0

    (warning,) = [line for line in capsys.readouterr().out.splitlines() if "warning: startup-hook" in line]
    assert f"{named} is not supported: " in warning


@pytest.mark.parametrize(
    "line",
    [
        "pip install -r requirements.txt",
        "pip install --upgrade-strategy=only-if-needed humanize --no-user-cfg",
        "echo done # apt-get install git",
        "export APT=1; python3 -c 'import conda'",
        "pip list --user",
        "apt list --installed",
    ],
)
def test_what_a_hook_can_do_is_not_warned_of(line: str) -> None:
    assert list(unsupported(line)) == []


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


@pytest.mark.parametrize("value", [0, -1, "soon", True])
def test_the_time_for_installing_is_a_number_of_seconds(tmp_path: Path, value: Any) -> None:
    with pytest.raises(ConfigError, match=r"data\.dstrial\.install_timeout_s"):
        load_experiment(experiment(tmp_path, data={"dstrial": {"install_timeout_s": value}}), tmp_path)


def test_what_installs_is_told_from_what_does_not() -> None:
    assert may_install("sh -c 'pip install humanize && python train.py'")
    assert may_install("uv pip sync needs.txt")
    assert may_install("python setup.py develop")
    assert not may_install("export FROM_HOOK=1")
    assert not may_install("python train.py --pipeline install")
