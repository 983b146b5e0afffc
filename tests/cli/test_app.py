import importlib.metadata
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import warm_start

pytestmark = pytest.mark.process


def run(*arguments):
    env = {**os.environ, "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"}
    return warm_start.run(["dstrial.cli", *arguments], env=env, cwd=Path.cwd(), timeout=120)


def test_the_version_is_that_of_the_package():
    result = run("--version")

    assert result.returncode == 0
    assert result.stdout.strip() == f"dstrial {importlib.metadata.version('dstrial')}"


@pytest.mark.parametrize(
    "arguments", [(), ("frobnicate",), ("check",), ("check", "exp.yaml", "--slots", "0")]
)
def test_wrong_usage_exits_with_2(arguments):
    result = run(*arguments)

    assert result.returncode == 2
    assert "usage: dstrial" in result.stderr


@pytest.mark.parametrize(
    ("arguments", "near"),
    [
        (("rnu",), "run"),
        (("checkpoint", "inspct"), "inspect"),
        (("checkpoint", "inspect", "x", "--paramters"), "--parameters"),
        (("run", "exp.yaml", "--confg", "a=1"), "--config"),
    ],
)
def test_misspelt_word_names_the_nearest(arguments, near):
    result = run(*arguments)

    assert result.returncode == 2
    assert f"did you mean {near}?" in result.stderr


@pytest.mark.parametrize("option", ["--bind", "--device", "--nodes", "--verbose"])
def test_unrelated_option_gets_no_suggestion(option):
    result = run("run", "exp.yaml", option)

    assert result.returncode == 2
    assert "did you mean" not in result.stderr


@pytest.mark.parametrize("command", ["run", "checkpoint inspect", "list"])
def test_usage_line_names_the_command(command):
    assert run(*command.split(), "--help").stdout.startswith(f"usage: dstrial {command} [-h]")


@pytest.mark.parametrize("slots", ["0", "x", "1.5"])
@pytest.mark.parametrize("command", ["check", "run"])
def test_slots_that_are_no_number_are_explained(command, slots):
    result = run(command, "exp.yaml", "--slots", slots)

    assert result.returncode == 2
    assert (
        f"--slots: the value is '{slots}'; expected an integer of at least 1. Leave --slots out"
        in result.stderr
    )


def test_output_that_nobody_reads_is_no_traceback(tmp_path):
    (tmp_path / "exp.yaml").write_text(
        "searcher: {name: single, metric: loss, max_length: {batches: 1}}\nentrypoint: ls\n"
    )
    reader, writer = os.pipe()
    os.close(reader)
    result = subprocess.run(
        [sys.executable, "-m", "dstrial.cli", "check", "exp.yaml"],
        cwd=tmp_path,
        stdout=writer,
        stderr=subprocess.PIPE,
        text=True,
    )
    os.close(writer)

    assert (result.returncode, result.stderr) == (128 + signal.SIGPIPE, "")


@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"])
def test_check_with_closed_streams_exits_as_ever(tmp_path, closed):
    config = "searcher: {name: single, metric: loss, max_length: {batches: 1}}\nentrypoint: ls\n"
    for entrypoint, exit_code in ((config, 0), (config + "no_such_key: 1\n", 1)):
        (tmp_path / "exp.yaml").write_text(entrypoint)
        command = f"{sys.executable} -m dstrial.cli check exp.yaml {closed}"

        result = subprocess.run(["sh", "-c", command], cwd=tmp_path, capture_output=True, text=True)

        assert result.returncode == exit_code
        assert "Traceback" not in result.stderr


def test_a_checkout_that_is_not_installed_has_no_metadata_and_works(tmp_path):
    """So it is where a bare machine runs ``make gpu PYTHON=python3``."""
    code = (
        "import importlib.metadata as metadata, sys\n"
        "real = metadata.distribution\n"
        "def distribution(name):\n"
        "    if name == 'dstrial':\n"
        "        raise metadata.PackageNotFoundError(name)\n"
        "    return real(name)\n"
        "metadata.distribution = distribution\n"
        "every = metadata.distributions\n"
        "metadata.distributions = lambda **given: (one for one in every(**given) if one.metadata['Name'] != 'dstrial')\n"
        "from dstrial.cli.app import main\n"
        "sys.exit(main(sys.argv[1:]))\n"
    )

    def dstrial(*arguments):
        return subprocess.run(
            [sys.executable, "-c", code, *arguments],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=120,
        )

    shown = dstrial("--version")
    assert shown.returncode == 0, shown.stderr
    assert shown.stdout.startswith("dstrial ")
    looked = dstrial("doctor", "--fast")
    assert "a checkout that is not installed" in looked.stdout
    assert "packages: " in looked.stdout
