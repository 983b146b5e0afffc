import importlib.metadata
import subprocess
import sys

import pytest

pytestmark = pytest.mark.process


def run(*arguments):
    return subprocess.run([sys.executable, "-m", "dstrial.cli", *arguments], capture_output=True, text=True)


def test_the_version_is_that_of_the_package():
    result = run("--version")

    assert result.returncode == 0
    assert result.stdout.strip() == f"dstrial {importlib.metadata.version('dstrial')}"


def test_the_help_lists_every_command():
    result = run("--help")

    assert result.returncode == 0
    assert "check " in result.stdout
    assert "run " in result.stdout


@pytest.mark.parametrize(
    "arguments", [(), ("frobnicate",), ("check",), ("check", "exp.yaml", "--slots", "0")]
)
def test_wrong_usage_exits_with_2(arguments):
    result = run(*arguments)

    assert result.returncode == 2
    assert "usage: dstrial" in result.stderr
