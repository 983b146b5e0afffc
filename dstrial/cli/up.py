"""``dstrial up``: start the master of this machine."""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from dstrial.cli.streams import add_state_dir_argument, det_reaches, field_lines
from dstrial.cli.submit import await_hosts
from dstrial.errors import ConfigError, ConfigProblem, HostError, LaunchError, RequestError
from dstrial.hosts.hostfile import add_host_arguments, placement_lines, require_hostfile
from dstrial.launch.slots import slots_argument
from dstrial.master import daemon
from dstrial.master.state_directory import MasterRecord, StateDirectory
from dstrial.master.store.views.observe import num_live_allocations
from dstrial.visible_text import plural

if TYPE_CHECKING:
    from argparse import _SubParsersAction

    from dstrial.hosts.hostfile import Host
    from dstrial.master.login import Login
    from dstrial.master.settings import MasterSettings


def add_parser(subparsers: _SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser(
        "up",
        description="Start a master on 127.0.0.1, a server with Determined's REST API, and log the det command in to it. "
        "Experiments that were active when the last master ended continue.",
    )
    parser.add_argument(
        "--port",
        type=port_argument,
        metavar="N",
        help=f"TCP port, 0 for a free one (default: {daemon.DEFAULT_PORT})",
    )
    parser.add_argument(
        "--slots",
        type=slots_argument,
        metavar="N",
        help="offer N slots (default: all accelerators, or one slot per CPU core where there are none)",
    )
    hosts = add_host_arguments(parser)
    hosts.add_argument(
        "--slurm",
        action="store_true",
        help="use the nodes of the surrounding Slurm allocation (salloc, sbatch) as hosts",
    )
    hosts.add_argument(
        "--backend",
        choices=daemon.BACKENDS,
        help="agent: run trials on this machine or the hosts of --hostfile; slurm: each trial in a Slurm job; ray: each trial "
        "in a Ray placement group (default: agent)",
    )
    add_state_dir_argument(parser)
    parser.add_argument(
        "--config-file",
        metavar="master.yaml",
        help="settings file, with the keys of Determined's master.yaml",
    )
    parser.add_argument(
        "--no-password",
        action="store_true",
        help="at the first start, create the users determined and admin with empty passwords, as Determined does; "
        "every account of this machine can then log in",
    )
    parser.add_argument(
        "--foreground",
        action="store_true",
        help="run the master in this process until Ctrl-C, and print its log",
    )


def port_argument(text: str) -> int:
    if not text.isdecimal() or int(text) > 65535:
        raise argparse.ArgumentTypeError(f"{text!r} is no port; expected a number from 0 to 65535")
    return int(text)


def main(args: argparse.Namespace) -> int:
    """Start a master, or report that a master is already running.

    Returns 0; with ``--foreground``, only after the new master has ended.
    """
    state = StateDirectory.choose(args.state_dir)
    options = daemon.MasterOptions(
        port=args.port,
        num_slots=args.slots,
        config_file=None if args.config_file is None else str(Path(args.config_file).absolute()),
        has_passwords=not args.no_password,
        hostfile=None if args.hostfile is None else str(args.hostfile.absolute()),
        include=args.include,
        exclude=args.exclude,
        python=args.python,
        is_under_slurm=args.slurm,
        backend=args.backend,
    )
    record = state.running()
    if record is not None:
        sys.stdout.write("the master is already running\n")
        ignored = _ignored_options(args, record)
        if ignored:
            sys.stderr.write(
                f"warning: {', '.join(ignored)} changes nothing while the master runs; end it with `dstrial down` first\n"
            )
    elif args.foreground:
        _check_hosts(args, state, options)
        return _serve(state, options)
    else:
        has_hosts = _check_hosts(args, state, options)
        record = daemon.start(state, options, meanwhile=_import_login)
        if has_hosts:
            await_hosts(state)
    _print_login(state, record)
    return 0


def _check_hosts(args: argparse.Namespace, state: StateDirectory, options: daemon.MasterOptions) -> bool:
    """Check and print the hosts or nodes on which a new master runs trials.

    Returns False if the master has no hosts, Slurm or Ray, so that trials run on this machine only. Problems of hosts raise an
    error; they are only printed as warnings while trials of an earlier master run.
    """
    if not (options.hostfile or options.config_file or options.is_under_slurm or options.backend):
        require_hostfile(args)
        return False
    from dstrial.master.server import hosts_of, with_options
    from dstrial.master.settings import MasterSettings

    if options.is_under_slurm:
        _refuse_flags(
            "--slurm", {flag: value for flag, value in _host_flags(options).items() if flag != "--slurm"}
        )
    settings = MasterSettings.load(None if options.config_file is None else Path(options.config_file))
    settings = with_options(settings, options)
    try:
        if settings.backend == "ray":
            from dstrial.master.backends.queued.ray import check_ray

            _refuse_flags("backend ray", {**_host_flags(options), "--slots": options.num_slots})
            for name, count in check_ray(settings.ray_address).items():
                sys.stdout.write(f"{'node:':<10}{name}: {plural(count, 'slot')}\n")
        elif settings.backend == "slurm":
            from dstrial.master.backends.queued.slurm import check_slurm

            _refuse_flags("backend slurm", {**_host_flags(options), "--slots": options.num_slots})
            state.make()
            check_slurm(settings.slurm, state.path / "slurm")
        elif hosts := hosts_of(options, settings):
            _refuse_flags("hosts, whose file says the slots", {"--slots": options.num_slots})
            _show_hosts(state, options, settings, hosts)
        else:
            require_hostfile(args)
            return False
    except (HostError, LaunchError) as error:
        if not num_live_allocations(state):
            raise
        # The master must still recover the trials on the other hosts, or in its jobs.
        sys.stderr.write(f"warning: {error}\n")
    return True


def _host_flags(options: daemon.MasterOptions) -> dict[str, object]:
    return {
        "--hostfile": options.hostfile,
        "--include": options.include,
        "--exclude": options.exclude,
        "--slurm": options.is_under_slurm,
    }


def _refuse_flags(beside: str, flags: Mapping[str, object]) -> None:
    given = [flag for flag, value in flags.items() if value not in (None, "", False)]
    problems = [
        ConfigProblem(flag, f"given beside {beside}", "one of the two", "Leave it out.") for flag in given
    ]
    if problems:
        raise ConfigError(problems)


def _show_hosts(
    state: StateDirectory, options: daemon.MasterOptions, settings: MasterSettings, hosts: Sequence[Host]
) -> None:
    from dstrial.hosts.preflight import check_hosts
    from dstrial.hosts.srun import own_allocation, transport_of

    storage = settings.defaults(state.path).checkpoint_storage
    checked = check_hosts(
        hosts,
        python=options.python or settings.hosts_python or sys.executable,
        shared_directory=Path(storage.get("host_path") or storage["container_path"]),
        transport=transport_of(own_allocation()) if options.is_under_slurm else None,
    )
    for line in placement_lines(checked):
        sys.stdout.write(f"{'host:':<10}{line}\n")


def _import_login() -> None:
    """Import the modules for the login while the master starts, to save time."""
    from determined.common.api import authentication  # noqa: F401 - a third of a second


def _ignored_options(args: argparse.Namespace, record: MasterRecord) -> list[str]:
    """Return the given options of ``dstrial up`` that a running master ignores."""
    given = {
        f"--port {args.port}": args.port not in (None, 0, record.port),
        f"--slots {args.slots}": args.slots not in (None, len(record.slots)),
    }
    names = ("config_file", "no_password", "foreground", "hostfile", "slurm", "backend")
    given |= {f"--{name.replace('_', '-')}": bool(getattr(args, name)) for name in names}
    return [option for option, is_given in given.items() if is_given]


def _serve(state: StateDirectory, options: daemon.MasterOptions) -> int:
    import dataclasses
    import threading

    from dstrial.master.server import serve

    state.make()
    options = dataclasses.replace(options, port=daemon.choose_port(state, options))
    serve(
        state,
        options,
        # The login sends requests to this process, so it needs another thread.
        on_ready=lambda record: threading.Thread(
            target=_print_login, args=(state, record), daemon=True
        ).start(),
        shows_log=True,
    )
    return 0


def _print_login(state: StateDirectory, record: MasterRecord) -> None:
    """Log ``det`` in; print the master's address, slots and login link."""
    from dstrial.master.login import browser_link, log_in

    outcome = log_in(record)
    rows = [
        ("address", f"{record.address} (process {record.pid})"),
        ("slots", describe_slots(record)),
        ("state", str(state.path)),
        *_login_rows(outcome),
    ]
    with contextlib.suppress(RequestError):  # no such user; already reported above
        rows.append(("browser", f"{browser_link(record)} (once, within 10 minutes)"))
    sys.stdout.write(field_lines(rows, 10))
    if record.port != daemon.DEFAULT_PORT or not det_reaches(record.address):
        sys.stdout.write(f"export DET_MASTER={record.address}\n")
    sys.stdout.flush()


def describe_slots(record: MasterRecord) -> str:
    """Return the number of slots of each kind, for example ``2 cpu``."""
    kinds: dict[str, int] = {}
    for slot in record.slots:
        name = str(slot["kind"]) if slot["kind"] == "cpu" else f"{slot['kind']} ({slot['brand']})"
        kinds[name] = kinds.get(name, 0) + 1
    return ", ".join(f"{count} {name}" for name, count in kinds.items()) or "none"


def _login_rows(outcome: dict[str, Login]) -> list[tuple[str, str]]:
    from dstrial.master.login import USERNAME, Login

    foreign = [address for address, login in outcome.items() if login is Login.FOREIGN]
    if Login.REFUSED in outcome.values():
        sys.stderr.write(
            f"warning: there is no active user {USERNAME!r} (any more), so det is not logged in. Log in as another one with "
            "`dstrial login --user NAME`\n"
        )
        return [("det", "not logged in")]
    if not foreign:
        return [("det", "logged in")]
    sys.stderr.write(
        f"warning: det is logged in to another master at {' and '.join(foreign)}; that is left as it is. Replace that "
        "login with `dstrial login`\n"
    )
    return [("det", "not logged in" if len(foreign) == len(outcome) else f"not logged in at {foreign[0]}")]
