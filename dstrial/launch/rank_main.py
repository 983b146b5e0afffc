"""The main module of every rank of ``dstrial.launch``; records the rank's failure.

The launcher runs ``python -m dstrial.launch.rank_main --trial model_def:MyTrial [options]``, ``--script FILE ARGS…`` or
``--module NAME ARGS…``.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import runpy
import signal
import sys
import types
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dstrial import collector
from dstrial.errors import ConfigError, LaunchError, TrialImportError
from dstrial.fork_server.fork import PR_SET_PDEATHSIG, prctl
from dstrial.launch.failures import keep_whole_traceback, record_exception
from dstrial.launch.memory_shortage import memory_advice
from dstrial.launch.tracebacks import MAX_SHOWN_CHARS, short_traceback, whole_traceback
from dstrial.launch.trial_import import find_modules_first, import_trial, is_determined_trial
from dstrial.ranks.accelerate_backend import show_ranks_to_accelerate
from dstrial.ranks.heartbeat import leave
from dstrial.ranks.identity import identify
from dstrial.ranks.stack_dump import dump_stacks_on_signal
from dstrial.ranks.startup_phase import begin_phase, end_phases
from dstrial.ranks.stop_signals import LAUNCHED_VARIABLE, LAUNCHER_PID_VARIABLE
from dstrial.visible_text import cut_text

_MODULE = "dstrial.launch.rank_main"
# torch 2.13 deprecates these functions, which ZeRO of DeepSpeed 0.19 calls; users can change neither.
_COLLECTIVES_BY_OLD_NAME = ("all_gather_into_tensor", "reduce_scatter_tensor")


def trial_command(
    trial: str,
    *,
    context_dir: Path,
    config: Path | None = None,
    overrides: Sequence[str] = (),
    run_dir: Path | None = None,
    resume: str | None = None,
    test_mode: bool = False,
) -> list[str]:
    """Return the command line for one rank of the trial ``module:Class``.

    ``config`` is None on a cluster, which provides the config. ``overrides`` are texts ``key=value`` that take precedence over
    the config. ``resume`` names the checkpoint or run from which to resume; None for a new run. ``test_mode``: whether to train
    only two batches.
    """
    command = [sys.executable, "-m", _MODULE, "--trial", trial, "--context-dir", str(context_dir.resolve())]
    if config is not None:
        command += ["--config", str(config.resolve())]
    for override in overrides:
        command += [f"--override={override}"]
    if run_dir is not None:
        command += ["--run-dir", str(run_dir.resolve())]
    if resume is not None:
        command += [f"--resume={resume}"]
    return [*command, "--test"] if test_mode else command


def script_command(words: Sequence[str], *, directory: Path | None = None) -> list[str]:
    """Return the command that starts one rank of a user's command ``words``.

    A Python file or ``-m MODULE``, with or without ``python`` before it, is run by this module, which records the traceback.
    Any other command is returned unchanged.

    Raises:
        LaunchError: the Python file is missing in ``directory``, in which the ranks start; not checked if None.
    """
    rest = list(words)
    if (
        len(rest) > 1
        and Path(rest[0]).name.startswith("python")
        and (rest[1] == "-m" or _is_python_file(rest[1]))
    ):
        rest = rest[1:]
    if rest[0] == "-m" and len(rest) > 1:
        return [sys.executable, "-m", _MODULE, "--module", *rest[1:]]
    if _is_python_file(rest[0]):
        if directory is not None and not (directory / rest[0]).is_file():
            raise LaunchError(
                f"the script is {rest[0]!r}; expected a Python file. Correct its path, which is relative to "
                f"{directory.resolve()}."
            )
        return [sys.executable, "-m", _MODULE, "--script", *rest]
    return list(words)


def main(arguments: Sequence[str] | None = None) -> None:
    words = list(sys.argv[1:] if arguments is None else arguments)
    _end_with_launcher()
    dump_stacks_on_signal()
    _ignore_old_names_of_collectives()
    if isinstance(sys.stdout, io.TextIOWrapper):
        # Write whole lines, so that lines of ranks that share an output do not mix.
        sys.stdout.reconfigure(line_buffering=True, write_through=False)
    try:
        if words[:1] in (["--script"], ["--module"]):
            # A script may take any time to prepare before it calls dstrial.
            end_phases()
        if words[:1] == ["--script"]:
            _run_script(words[1], words[2:])
        elif words[:1] == ["--module"]:
            _run_module(words[1], words[2:])
        else:
            _run_trial(_parse_trial(words))
    except SystemExit as exit_:
        if isinstance(exit_.code, str):
            record_exception(exit_, exit_.code)
        elif not exit_.code:
            leave()
        raise
    except (TrialImportError, ConfigError) as error:
        text = cut_text(f"{type(error).__name__}: {error}", MAX_SHOWN_CHARS)
        whole = keep_whole_traceback(whole_traceback(error)) if isinstance(error, TrialImportError) else ""
        # The error is the same on every rank; the launcher shows it once.
        sys.exit(1 if record_exception(error, text, whole=whole) else text)
    except BaseException as error:  # noqa: BLE001  # trial process main: recorded, shown, and the process ends
        _record_failure(error)
        sys.exit(130 if isinstance(error, KeyboardInterrupt) else 1)
    leave()


def _record_failure(error: BaseException) -> None:
    advice = memory_advice(error)
    short = short_traceback(error)
    whole = "" if short.is_whole else keep_whole_traceback(whole_traceback(error))
    text = short.text if short.is_whole or whole else whole_traceback(error).rstrip("\n")
    is_recorded = record_exception(error, text, line=short.summary, advice=advice, whole=whole)
    if not (is_recorded and os.environ.get(LAUNCHED_VARIABLE)):
        texts = [text, *([advice] if advice else [])]
        print("\n".join(texts), file=sys.stderr, flush=True)  # noqa: T201  # in place of Python's own traceback


def _parse_trial(words: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog=f"python -m {_MODULE}")
    parser.add_argument("--trial", required=True)
    parser.add_argument("--context-dir", type=Path, required=True)
    parser.add_argument("--config", type=Path)
    parser.add_argument("--override", action="append", default=[])
    parser.add_argument("--run-dir", type=Path)
    parser.add_argument("--resume")
    parser.add_argument("--test", action="store_true")
    return parser.parse_args(words)


def _run_trial(options: argparse.Namespace) -> None:
    begin_phase("importing torch and DeepSpeed")
    # As Python does for scripts. A user's module may thus replace a module imported below; a fork server would refuse.
    find_modules_first(options.context_dir)
    with collector.paused_for_good():
        import dstrial.launch.imported_ahead  # noqa: F401
        from dstrial.config.experiment_config.config import load_experiment
        from dstrial.ranks.rendezvous_store import meet_privately
        from dstrial.resume.locate import saved_run_to_resume
        from dstrial.trainer import run_trial

    # For a trial the launcher serves no store, but the trial's module may create a process group when it is imported.
    meet_privately(identify(os.environ))
    os.chdir(options.context_dir)
    begin_phase(f"importing {options.trial.partition(':')[0]}")
    trial_class = import_trial(options.trial, options.context_dir)
    if is_determined_trial(trial_class):
        end_phases()
        _run_determined_trial(trial_class, options.trial)
        return
    experiment = None
    if options.config is not None:
        slots = identify(os.environ).world_size
        experiment = load_experiment(
            options.config,
            options.context_dir,
            options.override,
            slots=slots,
            resumed=saved_run_to_resume(options.resume, options.run_dir),
        )
    run_trial(
        trial_class,
        experiment=experiment,
        run_dir=options.run_dir,
        resume=options.resume,
        test_mode=options.test,
    )


def _run_determined_trial(trial_class: type[Any], spec: str) -> None:
    import determined
    from determined.exec import harness

    info = determined.get_cluster_info()
    if info is None:
        raise TrialImportError(
            f"--trial is {spec!r}, which is a trial class of Determined's own package; expected a subclass of "
            f"dstrial.DeepSpeedTrial off a cluster. Import DeepSpeedTrial from dstrial in {trial_class.__module__}."
        )
    identity = identify(os.environ)
    is_deepspeed = any(
        base.__module__.startswith("determined.pytorch.deepspeed") for base in trial_class.__mro__
    )
    names = {"DET_CHIEF_IP": info.container_addrs[0]}
    if is_deepspeed:
        names |= {
            "USE_DEEPSPEED": "1",
            "LOCAL_SIZE": str(identity.local_world_size),
            "CROSS_RANK": str(identity.node_rank),
            "CROSS_SIZE": str(identity.num_nodes),
        }
    else:
        names["USE_TORCH_DISTRIBUTED"] = "True"
    os.environ.update(names)
    exit_code = harness.main(spec)
    if exit_code:
        sys.exit(exit_code)


def _run_script(script: str, arguments: Sequence[str]) -> None:
    show_ranks_to_accelerate()
    path = Path(script)
    sys.argv = [script, *arguments]
    sys.path[0] = str(path.resolve().parent)
    # Not runpy.run_path: it clears the script's globals at the end, which threads and exit handlers may still use.
    module = types.ModuleType("__main__")
    module.__dict__.update(__file__=script, __builtins__=__builtins__)
    # Do not inherit this module's future statements.
    code = compile(path.read_bytes(), script, "exec", dont_inherit=True)
    sys.modules["__main__"] = module
    exec(code, module.__dict__)  # noqa: S102  # runs the user's own script


def _run_module(name: str, arguments: Sequence[str]) -> None:
    show_ranks_to_accelerate()
    sys.argv = [name, *arguments]
    runpy.run_module(name, run_name="__main__", alter_sys=True)


def _is_python_file(word: str) -> bool:
    return word.endswith(".py")


def _ignore_old_names_of_collectives() -> None:
    for name in _COLLECTIVES_BY_OLD_NAME:
        warnings.filterwarnings(
            "ignore",
            message=rf"`torch\.distributed\.{name}` is deprecated",
            category=FutureWarning,
            module=r"torch\.distributed\.c10d_logger$",
        )


def _end_with_launcher() -> None:
    launcher_pid = os.environ.get(LAUNCHER_PID_VARIABLE)
    if launcher_pid is None or not sys.platform.startswith("linux"):
        return
    with contextlib.suppress(OSError, AttributeError):
        prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != int(launcher_pid):
        os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    main()
