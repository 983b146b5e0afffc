"""Make Accelerate config files by answering the questionnaire of ``accelerate config`` itself, on a pseudo-terminal.

``python tools/answer_accelerate_config.py DIR [NAME...]`` writes one file per entry of ``ANSWERS`` (or the named ones). The
files in ``tests/integrations/accelerate/converter/configs`` are its output with accelerate 1.15; run it again for another one.

An answer is a part of a question's text and what to type: a number chooses that row of a menu, a text is typed, followed by
Enter. Questions that are not listed get Enter, which takes the default.
"""

from __future__ import annotations

import contextlib
import os
import pty
import re
import select
import signal
import sys
import termios
import time
from collections.abc import Mapping
from pathlib import Path

DEADLINE_S = 180.0

_ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
_MENU_HINT = "selecting with enter"
_QUIET_S = 0.3

Answer = int | str

_GPUS = {"Which type of machine": 4, "use DeepSpeed?": "yes", "How many GPU(s)": "2"}
_TWO_MACHINES: dict[str, Answer] = {
    "How many different machines": "2",
    "IP address of the machine": "10.0.0.1",
    "port you will use": "29501",
    "How many GPU(s)": "8",
}

ANSWERS: Mapping[str, Mapping[str, Answer]] = {
    "zero0": {**_GPUS, "ZeRO optimization stage": 0},
    "zero1_bf16": {**_GPUS, "ZeRO optimization stage": 1, "mixed precision": 2, "accumulation steps": "4"},
    "zero2_defaults": dict(_GPUS),
    "zero2_offload_cpu_fp16": {
        **_GPUS,
        "offload optimizer states?": 1,
        "use gradient clipping": "yes",
        "gradient clipping value": "0.5",
        "mixed precision": 1,
    },
    "zero2_offload_everything": {**_GPUS, "offload optimizer states?": 1, "offload parameters?": 1},
    "zero2_offload_nvme": {
        **_GPUS,
        "offload optimizer states?": 2,
        "Path to offload optimizer": "/local_nvme",
    },
    "zero3_init_save16": {
        **_GPUS,
        "ZeRO optimization stage": 3,
        "save 16-bit model": "yes",
        "deepspeed.zero.Init": "yes",
        "mixed precision": 2,
    },
    "zero3_offload_cpu": {
        **_GPUS,
        "ZeRO optimization stage": 3,
        "offload optimizer states?": 1,
        "offload parameters?": 1,
        "accumulation steps": "2",
    },
    "zero3_offload_nvme": {
        **_GPUS,
        "ZeRO optimization stage": 3,
        "offload optimizer states?": 2,
        "offload parameters?": 2,
        "Path to offload parameters": "/nvme/params",
        "Path to offload optimizer": "/nvme/optimizer",
        "mixed precision": 2,
    },
    "config_file": {**_GPUS, "specify a json file": "yes", "path to the json": "ds_zero2.json"},
    "config_file_zero3_init": {
        **_GPUS,
        "specify a json file": "yes",
        "path to the json": "ds_zero2.json",
        "deepspeed.zero.Init": "yes",
    },
    "two_machines_standard": {**_GPUS, **_TWO_MACHINES, "rank of this machine": 1, "Type of launcher": 1},
    "two_machines_pdsh_hostfile": {
        **_GPUS,
        **_TWO_MACHINES,
        "Type of launcher": 0,
        "location of hostfile": "hostfile",
        "exclusion filter string?": "yes",
        "DeepSpeed exclusion filter": "worker-1:0",
    },
    "two_machines_slurm_inclusion": {
        **_GPUS,
        **_TWO_MACHINES,
        "ZeRO optimization stage": 3,
        "Type of launcher": 6,
        "location of hostfile": "hostfile",
        "inclusion filter string?": "yes",
        "DeepSpeed inclusion filter": "worker-0@worker-1",
        "same local network": "no",
        "rendezvous backend": "c10d",
    },
    "dynamo_debug_moe": {
        **_GPUS,
        "checked while running for errors": "yes",
        "torch dynamo": "yes",
        "dynamo backend": 2,
        "customize the defaults": "yes",
        "mode do you want": 1,
        "fullgraph mode": "no",
        "dynamic shape": "yes",
        "Mixture-of-Experts": "yes",
        "MoE layer class names": "MixtralSparseMoeBlock",
    },
    "one_gpu_by_id": {
        "Which type of machine": 0,
        "use DeepSpeed?": "yes",
        "How many GPU(s)": "1",
        "mixed precision": 2,
    },
    "multi_cpu": {"Which type of machine": 1, "How many processes": "2"},
    "multi_gpu_without_deepspeed": {"Which type of machine": 4, "How many GPU(s)": "4", "mixed precision": 2},
}
"""Name of each file -> its answers."""


def answer(answers: Mapping[str, Answer], target: Path) -> str:
    """Run ``accelerate config``, answer each question by a part of its text, and return all that it printed."""
    command = [
        sys.executable,
        "-m",
        "accelerate.commands.accelerate_cli",
        "config",
        "--config_file",
        str(target),
    ]
    pid, terminal = pty.fork()
    if pid == 0:
        os.environ |= {"COLUMNS": "200", "LINES": "50", "TERM": "xterm", "PYTHONWARNINGS": "ignore"}
        os.execv(sys.executable, command)  # noqa: S606  # the child of the fork
    try:
        printed, unused = _converse(terminal, answers)
    finally:
        os.close(terminal)
        with contextlib.suppress(ChildProcessError):
            if os.waitpid(pid, os.WNOHANG) == (0, 0):
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
    if not target.is_file():
        raise RuntimeError(f"{target.name} was not written; accelerate config printed:\n{printed}")
    if unused:
        raise RuntimeError(
            f"{target.name}: accelerate config did not ask for {unused}; it printed:\n{printed}"
        )
    return printed


def _converse(terminal: int, answers: Mapping[str, Answer]) -> tuple[str, list[str]]:
    everything, seen = "", 0
    unused = set(answers)
    give_up_at_s = time.monotonic() + DEADLINE_S
    while True:
        if time.monotonic() > give_up_at_s:
            raise RuntimeError(
                f"accelerate config is not done after {DEADLINE_S:g} s; it printed:\n{everything}"
            )
        text, is_open = _read_until_quiet(terminal)
        everything += text
        if not is_open:
            return everything, sorted(unused)
        asked = everything[seen:]
        is_menu = _MENU_HINT in asked
        # A menu reads keys from a raw terminal, a question whole lines from a cooked one.
        if not asked.strip() or is_menu != _is_raw(terminal) or not (is_menu or _is_question(asked)):
            continue
        seen = len(everything)
        question = asked[: asked.index(_MENU_HINT)] if is_menu else asked
        words = " ".join(question.lower().split())
        kind = int if is_menu else str
        fitting = [key for key, typed in answers.items() if isinstance(typed, kind) and key.lower() in words]
        # What is asked last counts: before it stands the echo of the answer before.
        key = max(fitting, key=lambda one: words.rfind(one.lower()), default=None)
        unused.discard(key or "")
        chosen = "" if key is None else str(answers[key])
        os.write(terminal, (chosen + ("\r" if is_menu else "\n")).encode())


def _is_question(text: str) -> bool:
    return text.rstrip().endswith((":", "?", "]", ")"))


def _is_raw(terminal: int) -> bool:
    return not termios.tcgetattr(terminal)[3] & termios.ICANON


def _read_until_quiet(terminal: int) -> tuple[str, bool]:
    """Return what the program prints until it is quiet, without escape sequences, and whether it is still there."""
    found = b""
    while select.select([terminal], [], [], _QUIET_S)[0]:
        try:
            piece = os.read(terminal, 65536)
        except OSError:  # what Linux says when the other side is closed
            piece = b""
        if not piece:
            return _ESCAPES.sub("", found.decode(errors="replace")), False
        found += piece
    return _ESCAPES.sub("", found.decode(errors="replace")), True


def main() -> int:
    if len(sys.argv) < 2:
        sys.stderr.write(str(__doc__))
        return 2
    directory = Path(sys.argv[1])
    directory.mkdir(parents=True, exist_ok=True)
    for name in sys.argv[2:] or ANSWERS:
        answer(ANSWERS[name], directory / f"{name}.yaml")
        sys.stdout.write(f"{directory / name}.yaml\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
