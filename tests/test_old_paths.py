"""Module paths of earlier commits stay importable, as the very modules that they are now."""

from __future__ import annotations

import importlib
import pickle
import subprocess
import sys
from pathlib import Path

import pytest

from dstrial import old_paths

ROOT = Path(old_paths.__file__).parent.parent
MODULES = (ROOT / "tests" / "goldens" / "module_paths.txt").read_text().split()
"""Every module of the last commit before modules moved."""
GONE = {"dstrial.master.proxy.frames"}  # a library has its place


def is_module(path: str) -> bool:
    file = ROOT / path.replace(".", "/")
    return file.with_suffix(".py").exists() or (file / "__init__.py").exists()


def test_every_old_path_leads_to_a_file() -> None:
    table = old_paths.table()

    assert [
        old for old in sorted(set(MODULES) - GONE) if not is_module(old_paths.new_path(old, table) or old)
    ] == []


def test_the_table_leads_from_what_is_no_file_to_where_the_module_is() -> None:
    table = old_paths.table()

    for old, new in table.items():
        assert not is_module(old), f"{old} is a file: the finder would hide it"
        assert old_paths.new_path(new, table) is None, f"{old} leads to {new}, which has moved on"


@pytest.mark.filterwarnings("ignore:.*old path goes:DeprecationWarning")
def test_both_paths_are_one_module_with_its_own_name(moved: tuple[str, str]) -> None:
    old, new = (importlib.import_module(path) for path in moved)

    assert old is new
    assert new.__spec__ is not None
    assert new.__spec__.name == new.__name__ == moved[1]


@pytest.mark.parametrize(
    "package",
    [
        "dstrial",
        "dstrial.config",
        "dstrial.dsat",
        "dstrial.integrations.huggingface",
        "dstrial.launch",
        "dstrial.ranks",
    ],
)
def test_a_package_resolves_its_names_without_old_paths(package: str) -> None:
    found = importlib.import_module(package)
    homes = getattr(found, "_HOMES", None) or found._HOME
    has_whole_paths = package in ("dstrial", "dstrial.config", "dstrial.dsat")
    places = {home if has_whole_paths else f"{package}.{home}" for home in homes.values()}

    assert not {place for place in places if place.startswith("dstrial.") and not is_module(place)}


def test_the_old_path_says_where_the_module_is(moved: tuple[str, str]) -> None:
    with pytest.warns(DeprecationWarning, match=moved[1].replace(".", r"\.")):
        importlib.import_module(moved[0])


@pytest.mark.filterwarnings("ignore:.*old path goes:DeprecationWarning")
def test_a_pickle_that_names_the_old_path_is_the_same_class() -> None:
    found = pickle.loads(b"cdstrial.checkpoint.saved_run\nread_saved_run\n.")

    assert found.__module__ == "dstrial.resume.manifest"


@pytest.mark.process
@pytest.mark.parametrize("module", ["dstrial.dsat.trial"])
def test_python_runs_the_old_path(module: str) -> None:
    ended = subprocess.run(
        [sys.executable, "-m", module, "--help"], capture_output=True, text=True, timeout=60
    )

    assert ended.returncode == 0, ended.stderr
    assert "usage" in ended.stdout


@pytest.fixture
def moved(request: pytest.FixtureRequest) -> tuple[str, str]:
    """An old path that nothing has imported yet."""
    old = "dstrial.config.findings"
    sys.modules.pop(old, None)
    return old, old_paths.table()[old]
