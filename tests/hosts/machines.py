"""Simulate machines by Linux namespaces, each with its own sshd.

Each machine has its own network, processes, mounts, name and shared memory. A bridge in another namespace connects them, so the
real machine's network is unchanged. They see the real machine's files, except ``~/.ssh``, ``/dev/shm`` and hidden directories.
``cut`` drops packets silently; connections to a killed machine are refused. Needs root.
"""

from __future__ import annotations

import contextlib
import functools
import os
import secrets
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from waiting import wait_for

_NETWORK = "10.77.0"
_READY_S = 10.0
_SSHD = "/usr/sbin/sshd"
_INIT = """
hostname {name}
# Where no init of Debian's has made it.
mkdir -p /root/.ssh /run/sshd
mount --bind {keys} /root/.ssh
mount -t tmpfs tmpfs /dev/shm
# What a lost peer's packets wait for: 15 minutes by default.
sysctl -qw net.ipv4.tcp_retries2=5 || true
{sshd} -e -f {config} -E {log}
echo ready
exec sleep infinity
"""
_SSHD_CONFIG = """
Port 22
ListenAddress {address}
HostKey {key}
PidFile {directory}/sshd.pid
AuthorizedKeysFile {keys}/authorized_keys
StrictModes no
UsePAM no
PasswordAuthentication no
KbdInteractiveAuthentication no
PermitRootLogin prohibit-password
MaxStartups 100:30:200
"""
_SSH_CONFIG = """
Host *
  StrictHostKeyChecking accept-new
  UserKnownHostsFile {keys}/known_hosts
  IdentityFile {keys}/id_ed25519
"""


@functools.cache
def missing() -> str:
    """Return the missing requirements, "" if none; starts one machine to find out."""
    found = [name for name in ("ip", "unshare", "nsenter", "ssh", "ssh-keygen") if shutil.which(name) is None]
    found += [] if Path(_SSHD).exists() else ["sshd"]
    found += [] if os.geteuid() == 0 else ["root"]
    if found:
        return f"[{', '.join(found)}]"
    with tempfile.TemporaryDirectory(prefix="dm-", dir="/tmp") as root:
        try:
            Machines(1, Path(root)).close()
        except (OSError, AssertionError, subprocess.CalledProcessError, IndexError) as error:
            return f"[namespaces] ({error})"
    return ""


class Machine:
    """A simulated machine; ``address`` is its IPv4 address on ``eth0``."""

    def __init__(self, number: int, prefix: str, root: Path, switch: str) -> None:
        self.name, self.address = f"host{number}", f"{_NETWORK}.{10 + number}"
        self._namespace, self._cable, self._switch = f"{prefix}{number}", f"v{prefix}{number}", switch
        self._root = root / self.name
        self._root.mkdir()
        self._keys = root / f"ssh{number}"
        shutil.copytree(root / "ssh", self._keys)
        (self._keys / "config").write_text(_SSH_CONFIG.format(keys=self._keys))
        self._process: subprocess.Popen[bytes] | None = None
        self._init_pid = 0
        _run("ip", "netns", "add", self._namespace)
        etc = Path("/etc/netns", self._namespace)
        etc.mkdir(parents=True)
        shutil.copy(root / "hosts", etc / "hosts")  # `ip netns exec` mounts it over /etc/hosts
        cable, namespace = self._cable, self._namespace
        _run(*f"ip link add {cable} netns {switch} type veth peer name eth0 netns {namespace}".split())
        _run(*f"ip -n {switch} link set {cable} master br0 up".split())
        _run(*f"ip -n {namespace} addr add {self.address}/24 dev eth0".split())
        _run(*f"ip -n {namespace} link set eth0 up".split())
        _run(*f"ip -n {namespace} link set lo up".split())

    def boot(self) -> None:
        key = self._root / "key"
        if not key.exists():
            _run("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(key))
        config = self._root / "sshd_config"
        config.write_text(
            _SSHD_CONFIG.format(address=self.address, key=key, directory=self._root, keys=self._keys)
        )
        script = _INIT.format(
            name=self.name, keys=self._keys, sshd=_SSHD, config=config, log=self._root / "sshd.log"
        )
        options = ("--pid", "--mount", "--uts", "--ipc", "--fork", "--kill-child", "--mount-proc")
        words = ["ip", "netns", "exec", self._namespace, "unshare", *options, "--propagation=private"]
        self._process = subprocess.Popen(
            [*words, "bash", "-ec", script],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        assert self._process.stdout is not None
        said = self._process.stdout.readline()
        if said != b"ready\n":
            log = self._root / "sshd.log"
            said += self._process.stdout.read() + (log.read_bytes() if log.exists() else b"")
            self._process.wait()
            raise AssertionError(said.decode(errors="replace"))
        children = Path(f"/proc/{self._process.pid}/task/{self._process.pid}/children").read_text().split()
        self._init_pid = int(children[0])

    @property
    def is_up(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def words(self, command: Sequence[str], cwd: str | os.PathLike[str] | None = None) -> list[str]:
        where = os.fspath(cwd) if cwd is not None else str(Path.cwd())
        kinds = ("-n", "-u", "-p", "-m", "-i")
        return ["nsenter", "-t", str(self._init_pid), *kinds, f"--wdns={where}", "--", *command]

    def popen(
        self, command: Sequence[str], *, cwd: str | os.PathLike[str] | None = None, **options: Any
    ) -> subprocess.Popen[Any]:
        """Start a program on the machine; the returned process is its ``nsenter``."""
        return subprocess.Popen(self.words(command, cwd), **options)

    def run(
        self,
        command: Sequence[str],
        *,
        cwd: str | os.PathLike[str] | None = None,
        env: Mapping[str, str] | None = None,
        timeout: float = 60.0,
    ) -> subprocess.CompletedProcess[str]:
        """Run a program on the machine to its end; ``stdout`` includes stderr."""
        return subprocess.run(
            self.words(command, cwd),
            env=None if env is None else {**os.environ, **env},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            text=True,
            timeout=timeout,
            check=False,
        )

    def processes(self) -> dict[int, str]:
        """Return pid -> command line of the machine's processes, without sshd.

        A fork of a fork server is shown as ``dstrial fork: NAME``.
        """
        if not self.is_up:
            return {}
        text = self.run(["ps", "-wweo", "pid=,ppid=,comm=,args="]).stdout
        found = {}
        for line in text.splitlines():
            pid, _, name, words = line.split(None, 3)
            if "dstrial.fork_server.server" in words and not name.startswith("python"):
                words = f"{words.partition('dstrial.fork_server')[0]}dstrial fork: {name}"
            if pid != "1" and not words.startswith(("sshd: ", "ps -wweo", "[")):
                found[int(pid)] = words
        return found

    def find(self, *words: str) -> int | None:
        """Return the machine's pid of a process whose command line contains all words."""
        return next(
            (pid for pid, line in sorted(self.processes().items()) if all(word in line for word in words)),
            None,
        )

    def signal(self, pid: int, number: signal.Signals) -> None:
        self.run(["kill", f"-{number.value}", str(pid)])

    def cut(self) -> None:
        """Disconnect the network: packets are dropped silently."""
        _run("ip", "-n", self._switch, "link", "set", self._cable, "down")

    def heal(self) -> None:
        _run("ip", "-n", self._switch, "link", "set", self._cable, "up")

    def kill(self) -> None:
        """Kill all processes of the machine at once, as a power loss does."""
        if self.is_up and self._init_pid:  # pid 0 would signal our own process group
            os.kill(self._init_pid, signal.SIGKILL)
            assert self._process is not None
            self._process.wait()

    def stop_sshd(self) -> None:
        pid = int((self._root / "sshd.pid").read_text())
        self.signal(pid, signal.SIGTERM)
        wait_for(lambda: not _answers_ssh(self), f"sshd of {self.name} still listens", deadline_s=_READY_S)

    def kill_sshd(self) -> None:
        """Kill the sshd listener and the sshd of every connection."""
        lines = self.run(["ps", "-wweo", "pid=,comm="]).stdout.splitlines()
        for pid in [int(line.split()[0]) for line in lines if line.split()[1].startswith("sshd")]:
            self.signal(pid, signal.SIGKILL)

    def refuse_keys(self) -> None:
        (self._keys / "authorized_keys").write_text("")

    def hide(self, directory: Path) -> None:
        """Mount an empty file system over a directory of this machine only."""
        assert self.run(["mount", "-t", "tmpfs", "tmpfs", str(directory)], cwd="/").returncode == 0

    def close(self) -> None:
        self.kill()
        if self._process is not None:
            self._process.wait()
            assert self._process.stdout is not None
            self._process.stdout.close()
        _quietly("ip", "netns", "del", self._namespace)
        shutil.rmtree(Path("/etc/netns", self._namespace), ignore_errors=True)


class Machines:
    """All simulated machines, connected by one bridge."""

    def __init__(self, num: int, root: Path) -> None:
        self._prefix = f"d{secrets.token_hex(2)}"
        self._switch = f"{self._prefix}sw"
        self._root = root
        keys = root / "ssh"
        keys.mkdir(parents=True)
        _run("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(keys / "id_ed25519"))
        shutil.copy(keys / "id_ed25519.pub", keys / "authorized_keys")
        names = "".join(f"{_NETWORK}.{10 + i} host{i}\n" for i in range(1, num + 1))
        (root / "hosts").write_text(f"127.0.0.1 localhost\n{names}")
        self.all: list[Machine] = []
        _run("ip", "netns", "add", self._switch)
        try:
            _run(*f"ip -n {self._switch} link add br0 type bridge forward_delay 0 stp_state 0".split())
            _run(*f"ip -n {self._switch} link set br0 up".split())
            for number in range(1, num + 1):
                self.all.append(Machine(number, self._prefix, root, self._switch))
            for machine in self.all:
                machine.boot()
            for machine in self.all:
                problem = f"sshd of {machine.name} does not listen"
                wait_for(functools.partial(_answers_ssh, machine), problem, deadline_s=_READY_S)
        except BaseException:
            self.close()
            raise

    def __getitem__(self, number: int) -> Machine:
        """Return machine ``number``, counted from 1, named ``hostNUMBER``."""
        return self.all[number - 1]

    def hostfile(self, path: Path, slots: Sequence[int] | None = None) -> Path:
        """Write a hostfile of all machines, one slot each by default."""
        counts = slots or [1] * len(self.all)
        lines = [f"{one.name} slots={count}\n" for one, count in zip(self.all, counts, strict=False)]
        path.write_text("".join(lines))
        return path

    def processes(self) -> dict[str, list[str]]:
        """Return machine name -> command lines, without sshd and idle machines."""
        found = {machine.name: sorted(machine.processes().values()) for machine in self.all}
        return {name: lines for name, lines in found.items() if lines}

    def close(self) -> None:
        for machine in self.all:
            machine.close()
        _quietly("ip", "netns", "del", self._switch)


@contextlib.contextmanager
def machines(num: int) -> Iterator[Machines]:
    """Yield ``num`` machines; skip the test if this machine cannot simulate them."""
    lacking = missing()
    if lacking:
        pytest.skip(f"Requires: {lacking}")
    with tempfile.TemporaryDirectory(prefix="dm-", dir="/tmp") as root:
        made = Machines(num, Path(root))
        try:
            yield made
        finally:
            made.close()


def _answers_ssh(machine: Machine) -> bool:
    probe = f"exec 3<>/dev/tcp/{machine.address}/22"
    return _quietly(*machine.words(["timeout", "2", "bash", "-c", probe], "/")) == 0


def _run(*words: str) -> None:
    subprocess.run(words, check=True, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)


def _quietly(*words: str) -> int:
    return subprocess.run(
        words, check=False, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    ).returncode
