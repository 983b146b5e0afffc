import re
from pathlib import Path

import pytest

import dstrial
from dstrial.doctor import packages

ASKED = [
    "torch>=2.6",
    "deepspeed>=0.19.8,<0.20",
    "determined==0.38.1",
    'tokenizers>=0.22; extra == "huggingface"',
]
GOOD = {"torch": "2.13.0+cpu", "deepspeed": "0.19.8", "determined": "0.38.1", "tokenizers": "0.23"}


def judged(installed):
    found = packages.judge_requirements(packages.requirements(ASKED, installed))
    return {finding.name: finding for finding in found if finding.status != "ok"}


def test_supported_versions_are_ok():
    assert judged(GOOD) == {}
    assert judged({**GOOD, "torch": "2.14.0.dev20261101"}) == {}


@pytest.mark.parametrize(
    ("name", "version", "expected"),
    [
        ("torch", "2.5.1", ">=2.6"),
        ("deepspeed", "0.20.0", "<0.20"),
        ("deepspeed", "0.16.2", ">=0.19.8"),
        ("determined", "0.38.2", "==0.38.1"),
        ("determined", None, "missing"),
    ],
)
def test_unsupported_version_is_problem_with_install_hint(name, version, expected):
    installed = {key: value for key, value in {**GOOD, name: version}.items() if value is not None}
    (found,) = judged(installed).values()
    assert (found.name, found.status) == (name, "problem")
    assert expected in found.what
    assert f"'{name}" in found.todo


def test_optional_package_missing_is_ok_unsupported_is_note():
    assert judged({key: value for key, value in GOOD.items() if key != "tokenizers"}) == {}
    assert judged({**GOOD, "tokenizers": "0.15"})["extra huggingface"].status == "note"


def test_requirements_ignore_developer_extras_and_other_platforms():
    asked = [
        *ASKED,
        'ruff>=0.8; extra == "dev"',
        'dstrial[huggingface]; extra == "examples"',
        'winreg; sys_platform == "win32"',
    ]
    assert packages.requirements(asked, GOOD) == packages.requirements(ASKED, GOOD)


def test_check_passes_in_this_environment():
    found = packages.check()
    assert {finding.status for finding in found} == {"ok"}
    assert dstrial.__version__ in {finding.name: finding for finding in found}["dstrial"].what


def test_namesake_package_from_pypi_is_problem(tmp_path, monkeypatch):
    information = tmp_path / "dstrial-0.0.3.dist-info"
    information.mkdir()
    (information / "METADATA").write_text("Metadata-Version: 2.1\nName: dstrial\nVersion: 0.0.3\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    (found,) = [finding for finding in packages.check() if finding.status != "ok"]
    assert (found.name, found.status) == ("dstrial", "problem")
    assert f"another package of this name is installed: 0.0.3 in {tmp_path}" in found.what
    assert "pip uninstall dstrial" in found.todo
    assert "DSTRIAL_CHECKOUT_OR_WHEEL" in found.todo


def test_package_version_equals_pyproject_version():
    text = Path(dstrial.__file__).parents[1].joinpath("pyproject.toml").read_text()
    assert re.search(r'^version = "(.+)"$', text, re.MULTILINE)[1] == dstrial.__version__
