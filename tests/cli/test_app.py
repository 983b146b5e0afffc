"""``dstrial`` command line: usage errors, closed streams, missing metadata."""

import importlib.metadata
import os
import signal
import subprocess
import sys

import pytest

NO_SLOTS = "--slots: the value is '{}'; expected an integer of at least 1. Leave --slots out"


def test_version_option_prints_package_version(dstrial_command):
    assert dstrial_command("--version")[:2] == (0, f"dstrial {importlib.metadata.version('dstrial')}\n")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("", "usage: dstrial"),
        ("frobnicate", "usage: dstrial"),
        ("check", "usage: dstrial check"),
        ("rnu", "did you mean run?"),
        ("checkpoint inspct", "did you mean inspect?"),
        ("checkpoint inspect x --paramters", "did you mean --parameters?"),
        ("run exp.yaml --confg a=1", "did you mean --config?"),
        *((f"run exp.yaml {option}", "unrecognized") for option in ("--bind", "--device", "--nodes")),
        *((f"check exp.yaml --slots {slots}", NO_SLOTS.format(slots)) for slots in ("0", "x", "1.5")),
        ("run exp.yaml --slots 0", NO_SLOTS.format("0")),
        ("checkpoint verify", "usage: dstrial checkpoint verify"),
        ("checkpoint mend x", "invalid choice: 'mend'"),
        ("checkpoint export x y --max-shard-size much", "expected for example 5GB"),
        ("list -n 0", "expected an integer of at least 1"),
    ],
)
def test_wrong_usage_exits_2_and_suggests_word(dstrial_command, words, said):
    exit_code, _, err = dstrial_command(*words.split())
    assert exit_code == 2
    assert said in err
    assert ("did you mean" in err) is ("did you mean" in said)


@pytest.mark.process
def test_closed_output_pipe_causes_no_traceback(tmp_path):
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


@pytest.mark.process
@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"])
def test_closed_streams_do_not_change_check_exit_code(tmp_path, closed):
    config = "searcher: {name: single, metric: loss, max_length: {batches: 1}}\nentrypoint: ls\n"
    for entrypoint, exit_code in ((config, 0), (config + "no_such_key: 1\n", 1)):
        (tmp_path / "exp.yaml").write_text(entrypoint)
        command = f"{sys.executable} -m dstrial.cli check exp.yaml {closed}"

        result = subprocess.run(["sh", "-c", command], cwd=tmp_path, capture_output=True, text=True)

        assert result.returncode == exit_code
        assert "Traceback" not in result.stderr


@pytest.mark.process
def test_uninstalled_checkout_runs_without_package_metadata(tmp_path):
    """A machine that runs ``make gpu PYTHON=python3`` has no installed ``dstrial``."""
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
    assert "dstrial: " in looked.stdout
    assert "packages: " in looked.stdout
