"""Read the master's settings file: keys of Determined's master, and dstrial's own."""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dstrial.config.diagnostics import Diagnostics, render
from dstrial.config.documents import read_yaml
from dstrial.config.experiment_config.submission import MasterDefaults
from dstrial.config.keys import Dialect, Rule, Section, check_keys
from dstrial.config.secrets import MASK, SecretNames, masked, masked_shell
from dstrial.errors import ConfigError
from dstrial.master.daemon import BACKENDS, DEFAULT_PORT, ENGINES
from dstrial.slurm.script import sbatch_args

DEFAULT_POOL = "default"
DEFAULT_TENSORBOARD_TIMEOUT_S = 300
DEFAULT_WARM_IDLE_TIMEOUT_S = 300
DEFAULT_TRIAL_LOG_BYTES = 2**30
DEFAULT_RAY_ADDRESS = "auto"
_string = functools.partial(Rule, types=("string",))
_list = functools.partial(Rule, types=("list",), default=[])
_integer = functools.partial(Rule, types=("integer",))
_boolean = functools.partial(Rule, types=("boolean",))


def _section(**keys: Rule) -> Rule:
    return Rule(types=("mapping",), section=Section(keys))


SETTINGS = Section(
    {
        "port": _integer(
            minimum=1,
            maximum=65535,
            about="TCP port on the loopback interface; 8080 unless given",
        ),
        "launch_error": _boolean(
            default=True,
            about="whether to refuse an experiment that needs more slots than exist; if false, the experiment waits",
        ),
        "log": _section(
            level=Rule(
                types=("string",),
                default="info",
                enum=("trace", "debug", "info", "warn", "warning", "error", "critical"),
                ignores_case=True,
                about="lowest level of messages in the master's log",
            ),
        ),
        "checkpoint_storage": _section(
            type=Rule(
                types=("string",),
                default="shared_fs",
                enum=("shared_fs", "directory"),
                about="kind of storage",
            ),
            host_path=_string(
                about="directory of checkpoints; `checkpoints/` in the state directory unless given"
            ),
            storage_path=_string(about="subdirectory of `host_path`"),
            container_path=_string(about="directory of checkpoints, for type `directory`"),
            save_experiment_best=_integer(
                default=0, minimum=0, about="number of best checkpoints to keep per experiment"
            ),
            save_trial_best=_integer(
                default=1, minimum=0, about="number of best checkpoints to keep per trial"
            ),
            save_trial_latest=_integer(
                default=1, minimum=0, about="number of newest checkpoints to keep per trial"
            ),
        ),
        "resource_manager": _section(
            type=Rule(
                types=("string",), default="agent", enum=BACKENDS, about="Determined's name for `backend`"
            ),
            default_compute_resource_pool=_string(about="name of the master's only resource pool"),
        ),
        "task_container_defaults": _section(
            environment_variables=_list(about="`NAME=value` for every trial"),
            startup_hook=_string(about="shell lines that run before every trial, command and TensorBoard"),
        ),
        "tensorboard_timeout": _integer(
            default=DEFAULT_TENSORBOARD_TIMEOUT_S,
            minimum=0,
            about="idle timeout of TensorBoard tasks, in seconds; 0: no timeout",
        ),
        "retention_policy": _section(
            log_retention_days=_integer(
                minimum=-1,
                maximum=32767,
                about="number of days for which logs are kept; null and -1: forever",
            )
        ),
        "detached_timeout_s": _integer(
            default=300,
            minimum=1,
            about="heartbeat timeout of runs whose processes the master did not start, in seconds",
        ),
        "warm": _boolean(
            default=True,
            about="whether to fork trials from a server process that has already imported torch and DeepSpeed",
        ),
        "warm_accelerators": _boolean(default=False, about="whether `warm` also applies to trials with GPUs"),
        "warm_idle_timeout": _integer(
            default=DEFAULT_WARM_IDLE_TIMEOUT_S,
            minimum=1,
            about="seconds without trials after which the server process of `warm` exits",
        ),
        "webhooks": _section(
            base_url=_string(about="address of the web page, for links in webhook requests"),
        ),
        "limits": _section(
            trial_log_bytes=_integer(
                default=DEFAULT_TRIAL_LOG_BYTES,
                minimum=2**16,
                about="maximum size of a trial's or task's log; above it, the oldest lines are deleted",
            ),
        ),
        "masked_names": _list(
            about="further key names, with wildcards `*` and `?`, whose values are masked in shown configs"
        ),
        "hostfile": _string(
            about="file with the hosts that run trials, in DeepSpeed's format; path relative to the settings file"
        ),
        "hosts_python": _string(
            about="path of the Python interpreter on the hosts; the master's own path unless given"
        ),
        "backend": _string(
            enum=BACKENDS,
            about="where trials run: `agent` (this machine, or the hosts of `hostfile`), `slurm` or `ray`; "
            "`resource_manager.type` unless given",
        ),
        "slurm": _section(
            sbatch_args=_list(about="options of `sbatch` for all jobs"),
            slots_per_node=_integer(
                minimum=1, about="number of slots that a job takes on each node; Slurm chooses unless given"
            ),
            gpu_type=_string(about="GPU type to request, such as `h100`"),
        ),
        "ray": _section(
            address=_string(
                default=DEFAULT_RAY_ADDRESS, about="address of the Ray cluster, as `ray.init` takes it"
            )
        ),
    }
)
_DIALECT = Dialect(name="the embedded master's settings", null_is_absent=True)


@dataclasses.dataclass(frozen=True, slots=True)
class MasterSettings:
    """Validated settings of a master, with the settings file's defaults applied."""

    given: Mapping[str, Any]  # the settings file, with defaults
    port: int | None
    launch_error: bool  # reject experiments that need more slots than exist
    log_level: str
    checkpoint_storage: Mapping[str, Any]  # without a path: ``checkpoints`` in the state directory
    pool_name: str
    environment_variables: tuple[str, ...]  # ``NAME=value`` for every trial
    startup_hook: str  # shell commands before every entrypoint
    log_retention_days: int | None  # None and -1: forever
    tensorboard_timeout: int  # idle timeout, seconds; 0: never
    detached_timeout_s: int  # heartbeat timeout; heartbeats are sent every minute
    warm: bool  # start trials as forks of a process that has imported torch and DeepSpeed
    warm_accelerators: bool
    warm_idle_timeout: int  # seconds without trials until the fork server exits
    trial_log_bytes: int = DEFAULT_TRIAL_LOG_BYTES
    secret_names: SecretNames = dataclasses.field(default_factory=SecretNames)
    base_url: str = ""  # URL of the web page, for links in webhooks
    hostfile: str | None = None  # absolute path
    hosts_python: str | None = None
    backend: str = "agent"  # agent (this machine, or hosts), slurm or ray
    slurm: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    ray_address: str = DEFAULT_RAY_ADDRESS

    @classmethod
    def load(cls, path: Path | None = None) -> MasterSettings:
        """Load a settings file (None: defaults); raise ``ConfigError`` with all problems."""
        label = "master.yaml" if path is None else str(path)
        given: Any = {}
        lines: dict[Any, str] = {}
        if path is not None:
            document = read_yaml(path, label)
            given, lines = document.value, document.lines
        findings = Diagnostics(lines, label)
        if given is None:
            given = {}
        if not isinstance(given, Mapping):
            findings.problem(
                (), render(given), "a mapping of settings", "Start with port: 8080, for example."
            )
            findings.raise_if_any()
        raw = check_keys(SETTINGS, given, _DIALECT, findings)
        _check(raw, findings)
        findings.raise_if_any()
        level = str(raw["log"]["level"]).lower()
        return cls(
            given=raw,
            port=raw["port"],
            launch_error=raw["launch_error"],
            log_level={"warn": "warning", "trace": "debug"}.get(level, level),
            checkpoint_storage={
                key: value for key, value in raw["checkpoint_storage"].items() if value is not None
            },
            pool_name=raw["resource_manager"]["default_compute_resource_pool"] or DEFAULT_POOL,
            environment_variables=tuple(raw["task_container_defaults"]["environment_variables"]),
            startup_hook=raw["task_container_defaults"]["startup_hook"] or "",
            log_retention_days=raw["retention_policy"]["log_retention_days"],
            tensorboard_timeout=raw["tensorboard_timeout"],
            detached_timeout_s=raw["detached_timeout_s"],
            warm=raw["warm"],
            warm_accelerators=raw["warm_accelerators"],
            warm_idle_timeout=raw["warm_idle_timeout"],
            trial_log_bytes=raw["limits"]["trial_log_bytes"],
            secret_names=SecretNames(tuple(raw["masked_names"])),
            base_url=(raw["webhooks"]["base_url"] or "").rstrip("/"),
            hostfile=_path(raw["hostfile"], path),
            hosts_python=raw["hosts_python"],
            backend=raw["backend"] or raw["resource_manager"]["type"],
            slurm={key: value for key, value in raw["slurm"].items() if value},
            ray_address=raw["ray"]["address"],
        )

    def defaults(self, state_dir: Path) -> MasterDefaults:
        """Return the defaults that the master merges into every experiment config.

        If the settings contain no storage path, the default storage is ``checkpoints`` in ``state_dir``.
        """
        storage = dict(self.checkpoint_storage)
        key = "host_path" if storage["type"] == "shared_fs" else "container_path"
        storage.setdefault(key, str(state_dir / "checkpoints"))
        return MasterDefaults(storage, self.environment_variables, self.launch_error)

    def as_config(self) -> dict[str, Any]:
        """Return the settings as Determined's master config, with secrets masked."""
        given = {
            key: value
            for key, value in self.given.items()
            if value is not None and (key == self.backend or key not in ("backend", *ENGINES))
        }
        config = {
            **given,
            "port": self.port or DEFAULT_PORT,
            "log": {"level": self.log_level, "color": False},
            "checkpoint_storage": dict(self.checkpoint_storage),
            "resource_manager": {
                "type": self.backend,
                "default_compute_resource_pool": self.pool_name,
                "default_aux_resource_pool": self.pool_name,
            },
            "resource_pools": [{"pool_name": self.pool_name}],
            "task_container_defaults": {
                "environment_variables": list(self.environment_variables),
                "startup_hook": masked_shell(self.startup_hook, self.secret_names),
            },
            "webhooks": {
                "signing_key": MASK,
                "base_url": self.base_url,
            },  # `dstrial webhook key` prints the key
            "feature_switches": [],
        }
        shown: dict[str, Any] = masked(config, self.secret_names)
        return shown


def _path(text: str | None, config_file: Path | None) -> str | None:
    """Make a path absolute; relative paths are relative to the settings file.

    Without a settings file, they are relative to the current directory. None stays None.
    """
    if text is None:
        return None
    beside = Path.cwd() if config_file is None else config_file.absolute().parent
    return str(beside / Path(text).expanduser())


def _check(raw: Mapping[str, Any], findings: Diagnostics) -> None:
    _check_backend(raw, findings)
    what = ("NAME=value", "Write OMP_NUM_THREADS=4, for example.")
    defaults = raw["task_container_defaults"]
    path = ("task_container_defaults", "environment_variables")
    _check_each(defaults["environment_variables"], path, "[^=]+=.*", what, findings)
    what = ("a name, with * and ? for what varies", 'Write "*_LICENSE", for example.')
    _check_each(raw["masked_names"], ("masked_names",), r".*[^*? ].*", what, findings)
    base_url = raw["webhooks"]["base_url"]
    if base_url and not base_url.startswith(("http://", "https://")):
        fix = "Write http://localhost:8080, for example."
        findings.problem("webhooks.base_url", render(base_url), "a URL of http or https", fix)
    host_path = raw["checkpoint_storage"]["host_path"]
    if host_path is not None and not host_path.startswith("/"):
        findings.problem(
            "checkpoint_storage.host_path", render(host_path), "an absolute path", f"Write /{host_path}."
        )


def _check_each(
    entries: list[Any],
    path: tuple[str | int, ...],
    pattern: str,
    what: tuple[str, str],
    findings: Diagnostics,
) -> None:
    """Report each of ``entries`` that does not match the regex ``pattern``.

    ``path`` is the key path of the list in the settings. ``what`` has two texts for the message: (expected value, fix).
    """
    for index, entry in enumerate(entries):
        if not isinstance(entry, str) or re.fullmatch(pattern, entry, re.DOTALL) is None:
            findings.problem((*path, index), render(entry), *what)


def _check_backend(raw: Mapping[str, Any], findings: Diagnostics) -> None:
    kind = raw["resource_manager"]["type"]
    backend = raw["backend"] or kind
    if kind not in ("agent", backend):
        findings.problem(
            "backend",
            render(raw["backend"]),
            f"{kind!r}, as resource_manager.type says",
            "Remove one of them.",
        )
    if backend != "agent" and raw["hostfile"] is not None:
        findings.problem(
            "hostfile", f"given beside backend: {backend}", "one of the two", "Remove one of them."
        )
    try:
        sbatch_args(raw["slurm"], [], "slurm")
    except ConfigError as error:
        for problem in error.problems:
            findings.problem(("slurm", "sbatch_args"), problem.got, problem.expected, problem.fix)
