"""Import of the user's trial class, and its error messages."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from dstrial.errors import TrialImportError
from dstrial.launch.trial_import import import_trial, is_determined_trial


@pytest.fixture(autouse=True)
def _restore_sys_modules() -> Iterator[None]:
    path, modules = list(sys.path), set(sys.modules)
    yield
    sys.path[:] = path
    for name in set(sys.modules) - modules:
        if name.startswith("trial_import_"):
            del sys.modules[name]


def _write(directory: Path, text: str, name: str) -> str:
    (directory / f"{name}.py").write_text(text)
    return name


def test_import_trial_finds_sibling_modules(tmp_path: Path) -> None:
    _write(tmp_path, "VALUE = 3\n", "trial_import_helper")
    name = _write(
        tmp_path,
        "from trial_import_helper import VALUE\nclass MyTrial:\n    value = VALUE\n",
        "trial_import_good",
    )
    assert import_trial(f"{name}:MyTrial", tmp_path).value == 3
    assert sys.path[0] == str(tmp_path)


def test_import_error_shows_only_user_frames(tmp_path: Path) -> None:
    name = _write(tmp_path, "x = 1\n\ny = undefined_name\n", "trial_import_bad")
    with pytest.raises(TrialImportError) as caught:
        import_trial(f"{name}:MyTrial", tmp_path)
    text = str(caught.value)
    assert f'File "{name}.py", line 3' in text
    assert text.endswith("NameError: name 'undefined_name' is not defined")
    assert "importlib" not in text
    assert text.count("File ") == 1


@pytest.mark.parametrize(
    ("source", "error"),
    [
        ("import no_such_package_at_all\n", "ModuleNotFoundError"),
        ("def f(:\n", "SyntaxError"),
        ("raise SystemExit(3)\n", "SystemExit"),
    ],
)
def test_any_exception_on_import_is_trial_import_error(source: str, error: str, tmp_path: Path) -> None:
    name = _write(tmp_path, source, f"trial_import_{error.lower()}")
    with pytest.raises(TrialImportError, match=f"importing it fails with {error}"):
        import_trial(f"{name}:MyTrial", tmp_path)


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("trial_import_named", "expected module:Class"),
        ("trial_import_named:MyTrail", "expected one of MyTrial. Write trial_import_named:MyTrial."),
        ("trial_import_named:Unlike", "Define class Unlike there"),
        ("trial_import_absent:MyTrial", "has no module trial_import_absent"),
        ("trial_import_absent.sub:MyTrial", "has no module trial_import_absent.sub"),
    ],
)
def test_wrong_trial_spec_error_suggests_correction(spec: str, message: str, tmp_path: Path) -> None:
    _write(tmp_path, "from pathlib import Path\nclass MyTrial: ...\n", "trial_import_named")
    with pytest.raises(TrialImportError, match=re.escape(message)):
        import_trial(spec, tmp_path)


def test_is_determined_trial_excludes_dstrial_trials() -> None:
    theirs = type("Base", (), {"__module__": "determined.pytorch._pytorch_trial"})
    ours = type("Ours", (theirs,), {"__module__": "dstrial.trial"})
    assert is_determined_trial(type("MyTrial", (theirs,), {"__module__": "model_def"}))
    assert not is_determined_trial(type("MyTrial", (ours,), {"__module__": "model_def"}))
    assert not is_determined_trial(type("MyTrial", (), {"__module__": "model_def"}))
