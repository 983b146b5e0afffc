"""Log slow startup phases of ranks, each again when its duration has doubled.

``starting.json`` in the allocation's directory has the current phase, for ``dstrial run`` and ``dstrial status``.
"""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from dstrial.launch.stale_locks import Build, extensions_root, remove_stale_locks, running_builds
from dstrial.launch.watches import StatusFile, polling
from dstrial.ranks.startup_phase import TRAINING, read_phase

STARTING_NAME = "starting.json"
_START_POLL_S = 0.5
# A new phase is logged if no line was logged for this time, so that several short phases make no long silence.
_SILENCE_S = 4.0
_LOADING_S = 30.0  # age at which a lock on a compiled extension is reported
_REPEAT_AFTER_S = 30.0  # age at which a phase is logged again; later each time its age has doubled
_INITIAL_PHASE = "creating the processes"

# Operator used in training -> the setting that enables it, and how to train without it. All others are for inference or
# special layers. Source: DeepSpeed 0.19.8 ``runtime/engine.py`` ``get_optimizer_configuration``, ``ops/op_builder``.
WITHOUT_OPERATOR = {
    "fused_adam": 'optimizers "Adam" and "AdamW": set `"torch_adam": true` in optimizer.params',
    "cpu_adam": '"Adam" with offload_optimizer: set `"torch_adam": true` in optimizer.params and '
    '`"zero_force_ds_cpu_optimizer": false`',
    "fused_lamb": 'optimizer "Lamb": take "AdamW" with `"torch_adam": true`',
    "fused_lion": 'optimizer "Lion": take "AdamW" with `"torch_adam": true`',
    "cpu_lion": '"Lion" with offload_optimizer: take "AdamW" with `"torch_adam": true`',
    "cpu_adagrad": '"Adagrad" with offload_optimizer: take "AdamW" with `"torch_adam": true`',
    "async_io": 'offload to NVMe: set the offload\'s device to "cpu" (to compile it, install libaio-dev)',
}


@dataclasses.dataclass(frozen=True, slots=True)
class Activity:
    """A startup phase of the ranks, or the build of an operator for which they wait.

    ``since_s`` is the start in epoch seconds; ``detail`` is for the log.
    """

    text: str
    since_s: float
    detail: str = ""


def is_due(age_s: float, logged_age_s: float | None, silence_s: float) -> bool:
    """Return whether to log the current startup phase now.

    ``age_s`` is the phase's age, ``logged_age_s`` its age when last logged (None: never). ``silence_s`` is the time since the
    last log line.
    """
    if logged_age_s is None:
        return silence_s >= _SILENCE_S
    return age_s >= max(_REPEAT_AFTER_S, 2 * logged_age_s)


def activity(phases: Sequence[tuple[str, float] | None], began_s: float) -> Activity | None:
    """Return the ranks' oldest startup phase; None if all ranks train.

    ``phases`` has (phase, start in epoch seconds) of each rank, or None for a rank that has not reported a phase since its start
    at ``began_s``.
    """
    current = [(_INITIAL_PHASE, began_s) if phase is None else phase for phase in phases]
    current = [phase for phase in current if phase[0] not in ("", TRAINING)]
    if not current:
        return None
    text, since_s = min(current, key=lambda phase: phase[1])
    return Activity(text, since_s)


def build_activity(operator: str, since_s: float, folder: Path, holder: str) -> Activity:
    clock = time.strftime("%H:%M:%S", time.localtime(since_s))
    without = WITHOUT_OPERATOR.get(operator)
    way = f"To do without, {without}; to compile before" if without else "To compile before"
    detail = (
        f"since {clock}{holder}; ranks that use it wait. It happens once and may take minutes: the result is kept in {folder} "
        f"for the next start. {way}, `DS_BUILD_OPS=1 pip install deepspeed`."
    )
    return Activity(f"compiling operator {operator}", since_s, detail)


@contextlib.contextmanager
def watched_start(
    phase_files: Callable[[], Sequence[Path]],
    print_line: Callable[[str], None],
    *,
    root: Path | None = None,
    every_s: float = _START_POLL_S,
) -> Iterator[None]:
    """Log the ranks' startup phases and builds of extensions inside the block.

    During a build all ranks and trials of a user wait silently for the same lock (torch 2.13 ``cpp_extension._jit_compile``,
    ``FileBaton.wait``). Stale locks are removed. ``phase_files`` returns the files to which ranks write their phases; ``root``
    is the directory of extensions.
    """
    watch = _Watch(phase_files, print_line, root)
    with polling(watch.poll, watch.close, name="dstrial-start-watch", every_s=every_s):
        yield


class _Watch:
    def __init__(
        self, phase_files: Callable[[], Sequence[Path]], print_line: Callable[[str], None], root: Path | None
    ) -> None:
        self._phase_files = phase_files
        self._print_line = print_line
        self._root = root or extensions_root()
        self._began_s = time.time()
        self._last_logged_s = self._began_s
        self._logged_age_s: dict[tuple[str, float], float] = {}
        self._status_file = StatusFile(STARTING_NAME)
        self._next_cleaning_s = 0.0

    def poll(self) -> None:
        if time.monotonic() >= self._next_cleaning_s:
            self._next_cleaning_s = time.monotonic() + 5.0
            remove_stale_locks(self._root)
        phases = [read_phase(path) for path in self._phase_files()]
        found = activity(phases, self._began_s)
        # Other builds do not block ranks that train; a script may wait for a build at any time.
        is_training = bool(phases) and all(phase is not None and phase[0] == TRAINING for phase in phases)
        builds = [] if is_training else self._builds()
        if builds:
            build = builds[0]
            found = build_activity(build.operator, build.since_s, build.folder, build.holder)
        if found is None:
            self._status_file.write(None)
            return
        self._status_file.write({"phase": found.text, "since_s": found.since_s})
        key = (found.text, found.since_s)
        age_s = time.time() - found.since_s
        if is_due(age_s, self._logged_age_s.get(key), time.time() - self._last_logged_s):
            is_again = key in self._logged_age_s
            self._last_logged_s = time.time()
            self._logged_age_s[key] = age_s
            still = "still " if is_again else ""
            detail = f", for {age_s:.0f} s" if age_s >= 1 else ""
            if found.detail and not is_again:
                detail = f" {found.detail}"
            self._print_line(f"starting: {still}{found.text}{detail}")

    def _builds(self) -> list[Build]:
        """Return builds of extensions that last longer than mere loading takes.

        Builds are found by their locks, because ranks also wait for builds of other trials and of the user's extensions.
        """
        return [
            build
            for build in running_builds(self._root)
            if time.time() - build.since_s >= (_LOADING_S if build.is_compiled else _SILENCE_S)
        ]

    def close(self) -> None:
        self._status_file.write(None)
