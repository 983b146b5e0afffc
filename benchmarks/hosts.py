"""What happens over several hosts when something is wrong: dstrial, DeepSpeed's launcher and torchrun in the same places.

Machines are namespaces (``tests/hosts/machines.py``): the launcher is on host1, ranks on host2 and host3. For each scenario:
seconds until the launcher has ended (after its start, or after what happens in the middle of training), its exit code, whether
the output names the host, on how many hosts training began, and what is left on the hosts 30 s later.

``python benchmarks/hosts.py --launcher dstrial torchrun --scenario cut kill --json hosts.json``; needs root, sshd and pdsh.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "hosts"))

from machines import Machines, machines, missing

_SCRIPT = Path(__file__).with_name("hosts_script.py")
_BIN = Path(sys.executable).parent
_LIMIT_S = 45.0
_LEFT_AFTER_S = 30.0
_PORT = 29_655
_ENVIRON = {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "eth0", "LOCAL_SIZE": "1"}


@dataclasses.dataclass(frozen=True)
class Scenario:
    """Something that goes wrong.

    Attributes:
        prepare: done before the start; may return another hostfile's path.
        strike: done when both hosts have trained ten steps; None if nothing is.
        hosts: on which ranks run.
        slots: of each in the hostfile.
        host: that has to be named; empty where none is to blame.
    """

    what: str
    prepare: Callable[[Machines, Path], None] = lambda _machines, _directory: None
    strike: Callable[[Machines, str], None] | None = None
    hosts: tuple[str, ...] = ("host2", "host3")
    slots: tuple[int, ...] = (1, 1)
    host: str = "host3"
    hostfile: str = "hosts"


@dataclasses.dataclass(frozen=True)
class Result:
    """What one launcher did."""

    scenario: str
    launcher: str
    first_step_s: float | None
    ended_s: float | None
    exit_code: int | None
    line: str
    num_trained: int
    is_complete: bool
    left: int


def _cut_and_heal(made: Machines, _launcher: str) -> None:
    made[3].cut()
    time.sleep(5)
    made[3].heal()


def _stop_rank(made: Machines, _launcher: str) -> None:
    _signal(made, 3, "hosts_script.py", signal.SIGSTOP, last=True)


def _kill_agent(made: Machines, launcher: str) -> None:
    words = {
        "dstrial": "dstrial.launch.node",
        "deepspeed": "deepspeed.launcher.launch",
        "torchrun": "torchrun",
    }
    _signal(made, 3, words[launcher], signal.SIGKILL)


def _kill_launcher(made: Machines, launcher: str) -> None:
    words = {"dstrial": "dstrial.launch", "deepspeed": "bin/deepspeed", "torchrun": "started-by-hand"}
    _signal(made, 1, words[launcher], signal.SIGKILL)


def _signal(made: Machines, machine: int, word: str, number: signal.Signals, *, last: bool = False) -> None:
    found = sorted(
        pid for pid, line in made[machine].processes().items() if word in line and "ssh" not in line[:4]
    )
    made[machine].signal(found[-1 if last else 0], number)


def _take_port(made: Machines, _directory: Path) -> None:
    program = f"import socket,time; s=socket.create_server(('', {_PORT})); time.sleep(600)"
    made[2].popen([sys.executable, "-c", program])
    time.sleep(0.5)


def _hide_version(made: Machines, _directory: Path) -> None:
    import deepspeed

    (info,) = Path(deepspeed.__file__).parents[1].glob("deepspeed-*.dist-info")
    made[3].hide(info)


SCENARIOS = {
    "start": Scenario("a start on three hosts", hosts=("host1", "host2", "host3"), slots=(1, 1, 1), host=""),
    "right": Scenario("nothing is wrong", host=""),
    "first": Scenario("first host unreachable", lambda made, _: made[2].cut(), host="host2"),
    "second": Scenario("second host unreachable", lambda made, _: made[3].cut()),
    "key": Scenario("no key on the second host", lambda made, _: made[3].refuse_keys()),
    "sshd": Scenario("nobody listens at its port of ssh", lambda made, _: made[3].stop_sshd()),
    "path": Scenario("wrong path of the hostfile", host="", hostfile="hots"),
    "slots": Scenario("unequal slots, 1 and 2", slots=(1, 2), host=""),
    "port": Scenario("the rendezvous' port is in use", _take_port, host="host2"),
    "python": Scenario("no Python on the second host", lambda made, _: made[3].hide(_BIN)),
    "version": Scenario("DeepSpeed's metadata missing there", _hide_version),
    "cut": Scenario("cable cut in mid-step", strike=lambda made, _: made[3].cut()),
    "heal": Scenario("cut in mid-step, back after 5 s", strike=_cut_and_heal),
    "kill": Scenario("host killed in mid-step", strike=lambda made, _: made[3].kill()),
    "stopped": Scenario("rank stopped (SIGSTOP)", strike=_stop_rank),
    "agent": Scenario("launcher on that host killed", strike=_kill_agent),
    "launcher": Scenario("launcher killed (SIGKILL)", strike=_kill_launcher, host=""),
}
LAUNCHERS = ("dstrial", "deepspeed", "torchrun")


def command(launcher: str, scenario: Scenario, directory: Path) -> list[str]:
    """Return what a user types on host1."""
    hostfile = str(directory / scenario.hostfile)
    if launcher == "dstrial":
        port = ["--master-port", str(_PORT)] if scenario is SCENARIOS["port"] else []
        return [sys.executable, "-m", "dstrial.launch", "--hostfile", hostfile, *port, str(_SCRIPT)]
    if launcher == "deepspeed":
        words = [
            "--hostfile",
            hostfile,
            "--master_addr",
            f"10.77.0.1{scenario.hosts[0][-1]}",
            "--master_port",
            str(_PORT),
        ]
        return [str(_BIN / "deepspeed"), *words, str(_SCRIPT)]
    # torchrun has no hostfile: somebody starts it on each host, and waits for all.
    variables = " ".join(f"{name}={value}" for name, value in _settings().items())
    starts = []
    first = f"10.77.0.1{scenario.hosts[0][-1]}"
    for number, (host, slots) in enumerate(zip(scenario.hosts, scenario.slots, strict=True)):
        nodes = f"--nnodes {len(scenario.hosts)} --nproc-per-node {slots} --node-rank {number}"
        there = (
            f"cd {directory} && env {variables} LOCAL_SIZE={slots} {_BIN / 'torchrun'} {nodes} "
            f"--master-addr {first} --master-port {_PORT} {_SCRIPT}"
        )
        starts.append(f"ssh -o ConnectTimeout=5 -o BatchMode=yes {host} {shlex.quote(there)} &")
    waits = "code=0; for job in $(jobs -p); do wait $job || code=$?; done; exit $code"
    return ["bash", "-c", f": started-by-hand; {' '.join(starts)} {waits}"]


def _settings() -> dict[str, str]:
    steps = {name: os.environ[name] for name in ("STEPS", "STEP_S") if name in os.environ}
    return {**_ENVIRON, **steps, "PYTHONPATH": ""}


def measure(name: str, launcher: str) -> Result:
    """Run one scenario with one launcher, on machines of its own."""
    scenario = SCENARIOS[name]
    with tempfile.TemporaryDirectory(prefix="hosts-", dir="/tmp") as text, machines(3) as made:
        directory = Path(text)
        lines = [
            f"{host} slots={slots}\n" for host, slots in zip(scenario.hosts, scenario.slots, strict=True)
        ]
        (directory / "hosts").write_text("".join(lines))
        made[1].run(["sh", "-c", "for h in host1 host2 host3; do ssh $h true; done"], cwd="/")
        variables = {**_settings(), "PATH": f"{_BIN}:/usr/bin:/bin", "PDSH_RCMD_TYPE": "ssh"}
        environment = "".join(f"{key}={value}\n" for key, value in variables.items())
        (directory / ".deepspeed_env").write_text(environment)
        scenario.prepare(made, directory)
        log_path = directory / "printed.log"
        with log_path.open("wb") as log:
            started_s = time.monotonic()
            words = ["env", *(f"{key}={value}" for key, value in variables.items())]
            process = made[1].popen(
                [*words, *command(launcher, scenario, directory)],
                cwd=directory, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT,
            )  # fmt: skip
            since_s, at = started_s, 0
            first_step_s = _first_step(process, log_path, started_s)
            if scenario.strike is not None:
                _await_steps(process, log_path)
                at = log_path.stat().st_size
                since_s = time.monotonic()
                scenario.strike(made, launcher)
            try:
                code: int | None = process.wait(max(since_s + _LIMIT_S - time.monotonic(), 1.0))
                ended_s: float | None = time.monotonic() - since_s
            except subprocess.TimeoutExpired:
                code = ended_s = None
            printed = log_path.read_text(errors="replace")
            left = _left(made) if scenario.strike is not None or ended_s is not None else 0
            process.kill()
            process.wait()
        trained = set(re.findall(r"(host\d) rank \d+ of \d+: step 0", printed))
        is_complete = len(re.findall(r": done", printed)) == sum(scenario.slots)
        line = _naming(printed[at:], scenario)
        return Result(name, launcher, first_step_s, ended_s, code, line, len(trained), is_complete, left)


def _first_step(process: subprocess.Popen[bytes], log_path: Path, started_s: float) -> float | None:
    """Return when the first rank has trained its first step, seconds after the start; None without one."""
    while time.monotonic() < started_s + _LIMIT_S:
        if ": step 0" in log_path.read_text(errors="replace"):
            return time.monotonic() - started_s
        if process.poll() is not None:
            return None
        time.sleep(0.02)
    return None


def _await_steps(process: subprocess.Popen[bytes], log_path: Path) -> None:
    give_up_at_s = time.monotonic() + 60
    while not {"host2", "host3"} <= set(
        re.findall(r"(host\d) rank \d+ of \d+: step 1\d", log_path.read_text(errors="replace"))
    ):
        if process.poll() is not None or time.monotonic() > give_up_at_s:
            raise SystemExit(f"training has not begun:\n{log_path.read_text(errors='replace')}")
        time.sleep(0.1)


def _left(made: Machines) -> int:
    """Count processes on the hosts, once nothing more goes or 30 s have passed."""
    give_up_at_s = time.monotonic() + _LEFT_AFTER_S
    while True:
        found = sum(len(lines) for name, lines in made.processes().items() if name != "host1")
        found -= any("create_server" in line for line in made.processes().get("host2", []))
        if not found or time.monotonic() > give_up_at_s:
            return found
        time.sleep(1)


def _naming(printed: str, scenario: Scenario) -> str:
    """Return the first line that names the host and is no rank's own; empty without one."""
    names = [scenario.host, f"10.77.0.1{scenario.host[-1]}"] if scenario.host else ["hots"]
    for line in printed.splitlines():
        line = re.sub(r"^host\d: ", "", line)  # pdsh says so before each line that a host prints
        is_ours = not re.search(r"rank \d+ of \d+: |\[INFO\]|frame #|\[c10d\]", line)
        if is_ours and any(name in line for name in names):
            return line.strip()[:160]
    return ""


def table(results: list[Result]) -> str:
    """Return the results as Markdown."""
    lines = [
        "| scenario | launcher | first step after | ended after | exit code | hosts that trained | complete | left on the hosts "
        "| the line that names the host |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for one in results:
        ended = f"not within {_LIMIT_S:g} s" if one.ended_s is None else f"{one.ended_s:.1f} s"
        code = "-" if one.exit_code is None else str(one.exit_code)
        first = "-" if one.first_step_s is None else f"{one.first_step_s:.1f} s"
        cells = [SCENARIOS[one.scenario].what, one.launcher, first, ended, code, str(one.num_trained)]
        left = "-" if one.ended_s is None else str(one.left)
        cells += ["yes" if one.is_complete else "no", left, one.line.replace("|", "/") or "-"]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> None:
    """Measure what the command line names, and print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--scenario", nargs="+", choices=SCENARIOS, default=list(SCENARIOS))
    parser.add_argument("--launcher", nargs="+", choices=LAUNCHERS, default=list(LAUNCHERS))
    parser.add_argument("--json", type=Path, help="write the results here, too")
    args = parser.parse_args()
    if lacking := missing():
        parser.exit(2, f"Requires: {lacking}\n")
    results = []
    for name in args.scenario:
        for launcher in args.launcher:
            results.append(measure(name, launcher))
            print(table(results[-1:]).splitlines()[-1], flush=True)
            if args.json is not None:
                args.json.write_text(json.dumps([dataclasses.asdict(one) for one in results], indent=2))
    print(f"\n{table(results)}")


if __name__ == "__main__":
    main()
