"""Slurm's accounting for a cluster of tests: a database and slurmdbd on its first machine.

With it Slurm knows accounts, users and QOS, and refuses whom they do not allow.
"""

from __future__ import annotations

import os
import shutil
import time
from pathlib import Path

from machines import Machine

PROGRAMS = ("slurmdbd", "sacctmgr", "mariadbd", "mariadb-install-db")
"""What it needs; Debian has them in ``slurmdbd``, ``slurm-client`` and ``mariadb-server``."""
CONFIG = """AccountingStorageType=accounting_storage/slurmdbd
AccountingStorageHost=host1
# With munge it is no password, but where munged is.
AccountingStoragePass={root}/munge/socket
AccountingStorageEnforce=associations,limits,qos"""
"""Lines of ``slurm.conf``, in the directory ``{root}``."""
_READY_S = 20.0
_DATABASE_CONFIG = """
[mariadbd]
user=root
datadir={root}/data
socket={root}/socket
pid-file={root}/pid
log-error={root}/log
tmpdir={root}
skip-networking
skip-name-resolve
skip-log-bin
innodb-buffer-pool-size=16M
innodb-log-file-size=4M
innodb-flush-log-at-trx-commit=0
"""
_CONFIG = """
DbdHost=host1
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={munge}
StorageType=accounting_storage/mysql
StorageHost=localhost
StorageUser=root
LogFile={root}/slurmdbd.log
PidFile={root}/slurmdbd.pid
DebugLevel=info
"""


class SlurmAccounting:
    """Slurm's accounting on one machine; ``munge`` is munged's socket."""

    def __init__(self, machine: Machine, directory: Path, munge: Path, env: dict[str, str]) -> None:
        self._machine = machine
        root = directory / "accounting"
        root.mkdir(mode=0o700)
        # The client's library looks for the socket where the environment says.
        self._env = {**env, "MYSQL_UNIX_PORT": str(root / "socket")}
        config = root / "my.cnf"
        config.write_text(_DATABASE_CONFIG.format(root=root))
        self._do(
            "mariadb-install-db",
            f"--defaults-file={config}",
            "--auth-root-authentication-method=normal",
            "--skip-test-db",
        )
        log = (root / "mariadbd.out").open("wb")
        with log:
            self._database = machine.popen(
                ["mariadbd", f"--defaults-file={config}"],
                cwd="/",
                env=self._env,
                stdout=log,
                stderr=log,
            )
        self._wait_for_socket(root)
        dbd = directory / "slurmdbd.conf"
        dbd.write_text(_CONFIG.format(root=root, munge=munge))
        dbd.chmod(0o600)
        self._do("slurmdbd")
        give_up_at_s = time.monotonic() + _READY_S
        while (said := machine.run(["sacctmgr", "show", "cluster"], cwd="/", env=self._env)).returncode != 0:
            assert time.monotonic() < give_up_at_s, said.stdout
            time.sleep(0.1)

    def _wait_for_socket(self, root: Path) -> None:
        give_up_at_s = time.monotonic() + _READY_S
        while not (root / "socket").exists():
            assert self._database.poll() is None, (root / "log").read_text()
            assert time.monotonic() < give_up_at_s, (root / "log").read_text()
            time.sleep(0.1)

    def _do(self, *words: str) -> None:
        done = self._machine.run(words, cwd="/", env=self._env)
        assert done.returncode == 0, f"{words}: {done.stdout}"

    def change(self, *words: str) -> None:
        self._do("sacctmgr", "--immediate", *words)


def missing() -> list[str]:
    """Return the programs that this machine lacks for it."""
    path = f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"
    return [name for name in PROGRAMS if shutil.which(name, path=path) is None]
