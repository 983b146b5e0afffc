"""How each sub-command of ``det`` 0.38.1 is tried, in this order, and what is expected of it.

Words in braces are filled with the numbers and names of what has been prepared, or was made by a command before.
"""

from __future__ import annotations

import dataclasses
from typing import Literal

NOT_OFFERED = "not offered by the embedded master"
ENTERPRISE = "Determined Enterprise Edition"
NONE = "00000000-0000-4000-8000-000000000000"
UUID = "([0-9a-f]{8}-[0-9a-f-]{27})"


@dataclasses.dataclass(frozen=True, slots=True)
class Invocation:
    """One sub-command as it is tried.

    Attributes:
        path: its names, without ``det``.
        words: what follows them.
        shows: a regular expression that its output contains.
        outcome: whether it works, works differently, or is not offered.
        reason: how it differs, or why it is not offered.
        code: its exit code; None for any but 0.
        typed: what the user types.
        username: who asks.
        is_process: whether it needs a process of its own.
        after: an experiment's placeholder and the state that it is to be in before.
        keeps: a placeholder that gets the first group of ``shows``.
    """

    path: str
    words: str = ""
    shows: str = ""
    outcome: Literal["works", "differs", "not offered"] = "works"
    reason: str = ""
    code: int | None = 0
    typed: str = ""
    username: str = "determined"
    is_process: bool = False
    after: tuple[str, str] | None = None
    keeps: str = ""


def _no(path: str, words: str, reason: str, shows: str = NOT_OFFERED, **more: str) -> Invocation:
    return Invocation(path, words, shows, "not offered", reason, None, **more)  # type: ignore[arg-type]


_SSO = "single sign-on needs an identity provider; users log in with passwords"
_RBAC = "there are users and administrators, and no roles"
_POLICIES = "policies of a cluster's administrators for their users"
_BINDINGS = "there is one resource pool, open to every workspace"
_KUBERNETES = "there is no Kubernetes"
_INTERACTIVE = "start the notebook or terminal on this machine directly"
_MESSAGE = "a notice to the users of a shared cluster"

INVOCATIONS: tuple[Invocation, ...] = (
    # Who and what
    Invocation("version", "", "0\\.38\\.1"),
    Invocation(
        "deploy",
        "local",
        "",
        "not offered",
        "starts Determined's own cluster in containers",
        None,
        is_process=True,
    ),
    Invocation("user whoami", "", "determined"),
    Invocation("user list", "", "admin"),
    Invocation("user create", "ada --password Secret-word-1", username="admin"),
    Invocation("user rename", "ada ada2", username="admin"),
    Invocation("user edit", "ada2 --display-name Ada", username="admin"),
    Invocation("user deactivate", "ada2", username="admin"),
    Invocation("user activate", "ada2", username="admin"),
    Invocation(
        "user link-with-agent-user",
        "ada2 --agent-uid 1000 --agent-gid 1000 --agent-user ada --agent-group ada",
        "every trial runs as the operating system's user",
        "not offered",
        "trials run as the user who started the master",
        None,
        username="admin",
    ),
    Invocation(
        "user change-password",
        "ada2",
        typed="Secret-word-2\nSecret-word-2\n",
        username="admin",
        is_process=True,
    ),
    Invocation("user login", "ada2", typed="Secret-word-2\n", is_process=True),
    Invocation("user logout", "", username="ada2"),
    Invocation("dev auth-token", "", "."),
    Invocation("dev curl", "/api/v1/me", "determined", is_process=True),
    Invocation("dev bindings list", "", "get_GetMe"),
    Invocation("dev bindings call", "get_GetMe", "determined"),
    # The master
    Invocation("master info", "", "clusterId"),
    Invocation("master config show", "", "checkpoint_storage", username="admin"),
    Invocation("master config set", "--log.level DEBUG", username="admin"),
    Invocation("master logs", "--tail 3", "serving at"),
    Invocation("agent list", "", "default"),
    Invocation("agent disable", "{agent}", username="admin"),
    Invocation("agent enable", "{agent}", username="admin"),
    Invocation("slot list", "", "FREE"),
    Invocation("slot disable", "{agent} 0", username="admin"),
    Invocation("slot enable", "{agent} 0", username="admin"),
    # Workspaces, projects, templates
    Invocation("workspace create", "lab"),
    Invocation("workspace list", "", "lab"),
    Invocation("workspace describe", "lab", "lab"),
    Invocation("workspace edit", "lab --name bench"),
    Invocation("workspace list-pools", "bench", "default"),
    Invocation("workspace archive", "bench"),
    Invocation("workspace unarchive", "bench"),
    Invocation("project create", "bench digits"),
    Invocation("project list", "bench", "digits"),
    Invocation("project edit", "bench digits --description d"),
    Invocation("project archive", "bench digits"),
    Invocation("project unarchive", "bench digits"),
    Invocation("workspace list-projects", "bench", "digits"),
    Invocation("template create", "small part.yaml"),
    Invocation("template set", "small part.yaml"),
    Invocation("template set-value config", "small part.yaml"),
    Invocation("template list", "", "small"),
    Invocation("template describe", "small", "description"),
    # Experiments
    Invocation("preview-search", "short.yaml", "Trials"),
    Invocation(
        "experiment create",
        "--paused --template small paused.yaml context",
        "Created experiment (\\d+)",
        keeps="made",
    ),
    Invocation("template remove", "small"),
    Invocation("experiment list", "", "short"),
    Invocation("experiment describe", "{e}", "COMPLETED"),
    Invocation("experiment config", "{e}", "entrypoint"),
    Invocation("experiment logs", "{e}", "batch 4"),
    Invocation("experiment list-trials", "{e}", "COMPLETED"),
    Invocation("experiment list-checkpoints", "{e}", "{c}"),
    Invocation("experiment wait", "{e}"),
    Invocation("experiment download", "{e} --top-n 1 -o best", "{c}"),
    Invocation("experiment download-model-def", "{e}"),
    Invocation("experiment label add", "{e} good"),
    Invocation("experiment label remove", "{e} good"),
    Invocation("experiment set name", "{e} renamed"),
    Invocation("experiment set description", "{e} described"),
    Invocation("experiment set max-slots", "{made} 1"),
    Invocation("experiment set priority", "{made} 10"),
    Invocation("experiment set weight", "{made} 2"),
    Invocation("experiment set log-retention", "{e} --days 30"),
    Invocation(
        "experiment set gc-policy",
        "--save-experiment-best 1 --save-trial-best 1 --save-trial-latest 4 --yes {e}",
    ),
    Invocation("experiment move", "{e} bench digits"),
    Invocation("project list-experiments", "bench digits", "renamed"),
    Invocation("project describe", "bench digits", "renamed"),
    Invocation("experiment archive", "{e}"),
    Invocation("experiment unarchive", "{e}"),
    Invocation(
        "experiment continue", "{again} --config name=continued", "Continued experiment|Created|continu"
    ),
    Invocation("job list", "", "{job}", after=("long", "RUNNING")),
    Invocation("task list", "", "Trial {longtrial} "),
    Invocation("experiment pause", "{long}"),
    Invocation("experiment activate", "{long}", after=("long", "PAUSED")),
    Invocation("job update", "{job} --priority 20"),
    Invocation("job update-batch", "{job}.priority=21"),
    Invocation("experiment cancel", "{long}"),
    Invocation("experiment kill", "{made}"),
    Invocation("experiment delete-tb-files", "{e}"),
    # Trials and checkpoints
    Invocation("trial describe", "{t}", "COMPLETED"),
    Invocation("trial logs", "{t}", "batch 4"),
    Invocation("trial set log-retention", "{t} --forever"),
    Invocation("trial support-bundle", "{t} -o .", "bundle"),
    Invocation(
        "trial download",
        "{t} --best -o trial-best",
        "",
        "differs",
        "finds its checkpoint only behind another one, and never with --uuid: a mistake of the client, on every master",
    ),
    Invocation("trial kill", "{othertrial}"),
    Invocation("task logs", "{task}", "batch 4"),
    Invocation("checkpoint describe", "{c}", "{c}"),
    Invocation("checkpoint download", "{c} -o downloaded", "downloaded"),
    Invocation("checkpoint rm", "{c3} --glob weights* --yes"),
    Invocation("checkpoint delete", "{c4} --yes"),
    # Models
    Invocation("model create", "net"),
    Invocation("model register-version", "net {c}"),
    Invocation("model list", "", "net"),
    Invocation("model describe", "net", "net"),
    Invocation("model list-versions", "net", "{c}"),
    Invocation("model move", "net -w bench"),
    Invocation("model delete", "net"),
    # Usage
    Invocation("resources raw", "2020-01-01T00:00:00 2100-01-01T00:00:00", "experiment_id"),
    Invocation("resources aggregated", "2026-01-01 2026-01-31", "aggregation_key|date"),
    Invocation("resources allocations", "2020-01-01T00:00:00 2100-01-01T00:00:00", "allocation_id"),
    Invocation("task cleanup-logs", "", username="admin"),
    # Processes beside trials
    Invocation("command run", "-d sleep 600", UUID, keeps="command"),
    Invocation("command list", "", "{command}"),
    Invocation("command describe", "{command}", "{command}"),
    Invocation("command config", "{command}", "sleep"),
    Invocation("command set priority", "{command} 30"),
    Invocation("command logs", "{command}"),
    Invocation("command kill", "{command}"),
    Invocation("tensorboard start", "{e} --no-browser -d", UUID, keeps="tensorboard"),
    Invocation("tensorboard list", "", "{tensorboard}"),
    Invocation("tensorboard config", "{tensorboard}"),
    Invocation("tensorboard set priority", "{tensorboard} 30"),
    Invocation("tensorboard open", "{tensorboard}", is_process=True),
    Invocation("tensorboard logs", "{tensorboard}"),
    Invocation("tensorboard kill", "{tensorboard}"),
    Invocation("task create", "task.yaml", "([\\w.-]{8,})\\s*$", keeps="generic"),
    Invocation("task config", "{generic}", "sleep"),
    Invocation("task pause", "{generic}"),
    Invocation("task unpause", "{generic}"),
    Invocation("task fork", "{generic}"),
    Invocation("task kill", "{generic}"),
    # The end of things
    Invocation("experiment delete", "{long} --yes", after=("long", "CANCELED")),
    Invocation("project delete", "gone empty --yes"),
    Invocation("workspace delete", "gone --yes"),
    # What is not offered
    Invocation("notebook list", "", "exitStatus", "differs", "always empty: there are no notebooks"),
    _no("notebook start", "--no-browser -d", _INTERACTIVE),
    *(_no(f"notebook {verb}", NONE, _INTERACTIVE) for verb in ("config", "kill")),
    _no("notebook open", NONE, _INTERACTIVE, "does not exist"),
    _no("notebook logs", NONE, _INTERACTIVE, "not found"),
    Invocation("notebook set priority", f"{NONE} 1", NOT_OFFERED, "not offered", _INTERACTIVE),
    Invocation("shell list", "", "exitStatus", "differs", "always empty: there are no shells"),
    _no("shell start", "-d", _INTERACTIVE),
    *(
        _no(f"shell {verb}", NONE, _INTERACTIVE)
        for verb in ("config", "kill", "open", "show-ssh-command", "show_ssh_command")
    ),
    _no("shell logs", NONE, _INTERACTIVE, "not found"),
    Invocation("shell set priority", f"{NONE} 1", NOT_OFFERED, "not offered", _INTERACTIVE),
    _no("auth list-providers", "", _SSO, ""),
    _no("auth login", "", _SSO, ""),
    _no("oauth client add", "app http://localhost", _SSO, ""),
    _no("oauth client list", "", _SSO, ""),
    _no("oauth client remove", "1", _SSO, ""),
    _no("rbac assign-role", "Viewer -u ada2", _RBAC, ""),
    _no("rbac unassign-role", "Viewer -u ada2", _RBAC, ""),
    _no("rbac describe-role", "Viewer", _RBAC, ""),
    _no("rbac list-groups-roles", "team", _RBAC, ""),
    _no("rbac list-users-roles", "ada2", _RBAC, ""),
    _no("rbac list-roles", "", _RBAC, ""),
    _no("rbac my-permissions", "", _RBAC, ""),
    _no("workspace list-members", "bench", _RBAC, ""),
    _no("user-group create", "team", _RBAC, ENTERPRISE),
    _no("user-group list", "", _RBAC, ENTERPRISE),
    _no("user-group describe", "team", _RBAC, ENTERPRISE),
    _no("user-group add-user", "team ada2", _RBAC, ENTERPRISE),
    _no("user-group remove-user", "team ada2", _RBAC, ENTERPRISE),
    _no("user-group change-name", "team crew", _RBAC, ENTERPRISE),
    _no("user-group delete", "team --yes", _RBAC, ENTERPRISE),
    Invocation("token create", "-d table -e 2", r"TokenID: (\d+)", keeps="access_token"),
    Invocation("token list", "", "table"),
    Invocation("token describe", "{access_token}", "ACCESS_TOKEN"),
    Invocation("token edit", "{access_token} -d edited", "Successfully updated"),
    Invocation("token revoke", "{access_token}", "Successfully revoked"),
    Invocation("token login", "none", "Caught UnauthenticatedException", code=None),
    _no("config-policies describe", "experiment -w bench", _POLICIES),
    _no("config-policies set", "experiment part.yaml -w bench", _POLICIES),
    _no("config-policies delete", "experiment -w bench", _POLICIES),
    _no("master cluster-message get", "", _MESSAGE),
    _no("master cluster-message set", "-m hello", _MESSAGE, username="admin"),
    _no("master cluster-message clear", "-c", _MESSAGE, username="admin"),
    _no("resource-pool bindings add", "default bench", _BINDINGS),
    _no("resource-pool bindings remove", "default bench", _BINDINGS),
    _no("resource-pool bindings replace", "default bench", _BINDINGS),
    Invocation("resource-pool bindings list-workspaces", "default", "default"),
    _no("workspace bindings list", "bench", _KUBERNETES),
    _no("workspace bindings set", "bench --namespace n", _KUBERNETES),
    _no("workspace bindings delete", "bench", _KUBERNETES),
    _no("workspace resource-quota set", "bench 4", _KUBERNETES),
)
