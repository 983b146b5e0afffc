"""Log slow startup phases of ranks, each again when its duration has doubled.

``starting.json`` in the allocation's directory has the current phase, for ``dstrial run`` and ``dstrial status``.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from dstrial.launch.stale_locks import extensions_root, remove_stale_locks, running_builds
from dstrial.launch.watches import StatusFile, polling
from dstrial.ranks.startup_phase import TRAINING, read_phase

STARTING_NAME = "starting.json"  # file in the allocation's directory with the current startup phase
_START_POLL_S = 0.5
# A new phase is logged if no line was logged for this time. So there is a line even if all phases are short.
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


def is_due(age_s: float, logged_age_s: float | None, silence_s: float) -> bool:
    """Return whether to log the current startup phase now.

    ``age_s`` is the phase's age, ``logged_age_s`` its age when last logged (None: never). ``silence_s`` is the time since the
    last log line. A new phase is due if there was no log line for 4 s. A logged phase is due at an age of 30 s or at twice the
    logged age, whichever is later.
    """
    if logged_age_s is None:
        return silence_s >= _SILENCE_S
    return age_s >= max(_REPEAT_AFTER_S, 2 * logged_age_s)


def oldest_phase(phases: Sequence[tuple[str, float] | None], began_s: float) -> tuple[str, float] | None:
    """Return (name, start) of the ranks' oldest startup phase; None if all train.

    ``phases`` has (phase, start in epoch seconds) of each rank, or None for a rank that has not reported a phase since its start
    at ``began_s``.
    """
    current = [(_INITIAL_PHASE, began_s) if phase is None else phase for phase in phases]
    return min((one for one in current if one[0] not in ("", TRAINING)), key=lambda one: one[1], default=None)


def build_detail(folder: Path, since_s: float) -> str:
    """Return a text on a running build of an extension, for the user.

    The text says when the build started, and how to avoid it. ``folder`` is the extension's directory, ``since_s`` the start of
    the build in epoch seconds.
    """
    clock = time.strftime("%H:%M:%S", time.localtime(since_s))
    without = WITHOUT_OPERATOR.get(folder.name)
    way = f"To do without, {without}; to compile before" if without else "To compile before"
    return (
        f" since {clock}; ranks that use it wait. It happens once and may take minutes: the result is kept in {folder} "
        f"for the next start. {way}, `DS_BUILD_OPS=1 pip install deepspeed`."
    )


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
        found = oldest_phase(phases, self._began_s)
        # Other builds do not block ranks that train; a script may wait for a build at any time.
        is_training = bool(phases) and all(phase is not None and phase[0] == TRAINING for phase in phases)
        detail = ""
        # Builds are found by their locks, because ranks also wait for builds of other trials and of the user's extensions.
        for folder, since_s in [] if is_training else running_builds(self._root)[:1]:
            is_compiled = any(folder.glob("*.so"))  # if so, the process probably only loads the operator
            if time.time() - since_s >= (_LOADING_S if is_compiled else _SILENCE_S):
                found, detail = (f"compiling operator {folder.name}", since_s), build_detail(folder, since_s)
        if found is None:
            self._status_file.write(None)
            return
        text, since_s = found
        self._status_file.write({"phase": text, "since_s": since_s})
        age_s = time.time() - since_s
        if is_due(age_s, self._logged_age_s.get(found), time.time() - self._last_logged_s):
            still = "still " if found in self._logged_age_s else ""
            self._last_logged_s = time.time()
            self._logged_age_s[found] = age_s
            if still or not detail:
                detail = f", for {age_s:.0f} s" if age_s >= 1 else ""
            self._print_line(f"starting: {still}{text}{detail}")

    def close(self) -> None:
        self._status_file.write(None)
