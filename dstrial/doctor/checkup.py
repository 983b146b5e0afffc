"""Run all checks of ``dstrial doctor`` in parallel; order the findings."""

from __future__ import annotations

import dataclasses
import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

from dstrial.doctor import devices, environment, libraries, limits
from dstrial.doctor.finding import Background, Finding, Group, NoAnswerError, problem
from dstrial.local.run_directory import default_runs_dir
from dstrial.master.state_directory import StateDirectory

_CHECK_DEADLINE_S = 30.0  # a check that takes longer is reported as a problem


@dataclasses.dataclass(frozen=True, slots=True)
class CheckupOptions:
    """Options of ``dstrial doctor``; a directory of None means the default one."""

    is_fast: bool = False  # skip importing libraries
    state_dir: str | None = None
    runs_dir: str | None = None
    num_gpus: int = 0  # required number of visible accelerators
    import_deadline_s: float = 60.0


def run(options: CheckupOptions) -> Iterator[Group]:
    """Start all checks at once; yield the findings of each check in a fixed order.

    If a check raises an exception or misses its deadline, its only finding is a problem. The other checks continue.
    """
    checks = {name: Background(check) for name, check in _checks(options).items()}
    for name, check in checks.items():
        try:
            findings = check.result(
                _CHECK_DEADLINE_S + (0.0 if options.is_fast else options.import_deadline_s)
            )
        except NoAnswerError as error:
            todo = "Something below it hangs: a file system, a driver or a name server."
            findings = [problem(name, str(error), todo)]
        except Exception as error:  # noqa: BLE001 - one check that fails must not hide the others
            what = f"the check itself failed: {type(error).__name__}: {error}"
            findings = [problem(name, what, "Report it, with the output of `dstrial doctor --json`.")]
        yield Group(name, check.seconds, tuple(findings))


def _checks(options: CheckupOptions) -> dict[str, Callable[[], list[Finding]]]:
    environ = dict(os.environ)
    state = StateDirectory.choose(options.state_dir)
    temporary = Path(tempfile.gettempdir())
    places = [("runs", default_runs_dir(options.runs_dir)), ("state", state.path), ("temporary", temporary)]
    hardware = Background(devices.measure)

    def known_devices() -> devices.Hardware:
        return hardware.result(_CHECK_DEADLINE_S / 2)

    checks = {
        "Python": environment.check_python,
        "Limits": lambda: limits.judge_limits(limits.measure_limits()),
        "Storage": lambda: limits.check_directories(places),
        "Network": environment.check_network,
        "Master": lambda: environment.check_master(state),
        "Environment variables": lambda: environment.judge_variables(environ),
        "Devices": lambda: devices.judge(known_devices(), environ, num_required=options.num_gpus),
    }
    if options.is_fast:
        return checks
    imported = Background(lambda: libraries.import_all(options.import_deadline_s))

    def known() -> libraries.Libraries:
        # Wait longer than the deadline: the probe is killed then, and its result comes a little later.
        return imported.result(options.import_deadline_s + _CHECK_DEADLINE_S / 2)

    return {
        **checks,
        "Libraries": lambda: libraries.judge(known(), known_devices(), environ),
        "Compilers": lambda: libraries.judge_compilers(libraries.measure_compilers(), known()),
    }
