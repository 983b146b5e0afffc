"""Transfer checkpoints to and from object storage, in a child process.

The child calls Determined's storage managers, which reset Python's random state after each transfer: in a rank's own process
this would change the order of training data. Arguments ``storage`` are results of ``external_storage``. Credentials in them
reach the child through a pipe and are masked in error messages.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import pathlib
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from typing import Any

from dstrial.checkpoint.completion_marker import MARKER_NAME, is_complete, read_marker
from dstrial.config.secrets import MASK, SecretNames, masked, secrets_in
from dstrial.errors import CheckpointError, CheckpointNotFoundError
from dstrial.harness_paths import ALLOCATION_DIR_VARIABLE

# Type of an external storage -> fields of `checkpoint_storage` that describe such a storage.
_FIELDS = {
    "s3": ("bucket", "prefix", "endpoint_url", "access_key", "secret_key"),
    "gcs": ("bucket", "prefix"),
    "azure": ("container", "account_url", "connection_string", "credential"),
    "directory": ("container_path",),
}
# Fields with credentials, and fields with the address of the storage's server.
_CREDENTIALS = ("access_key", "secret_key", "connection_string", "credential")
_SERVERS = ("endpoint_url", "account_url")
# Type of an object storage -> scheme of the addresses that users see.
_SCHEMES = {"s3": "s3", "gcs": "gs", "azure": "azure"}
ALL_FILES = "**/*"
STORAGE_KEY = "storage"
"""Key in a checkpoint's completion marker: the external storage that has the files, without credentials."""


def external_storage(config: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """Return the external checkpoint storage of an experiment config, or None.

    None means that the config has no storage, or storage of type ``shared_fs``. The result has the ``checkpoint_storage``
    fields that describe the storage, without masked values and ``save_…`` fields. A relative ``container_path`` is made
    absolute.
    """
    given = (config or {}).get("checkpoint_storage") or {}
    names = _FIELDS.get(str(given.get("type")))
    if names is None:
        return None
    found = {
        "type": given["type"],
        **{key: given[key] for key in names if given.get(key) not in (None, MASK)},
    }
    if "container_path" in found:
        found["container_path"] = os.path.abspath(found["container_path"])  # noqa: PTH100  # links are kept
    return found


def is_object_storage(storage: Mapping[str, Any] | None) -> bool:
    return storage is not None and storage.get("type") in _SCHEMES


def location_of(storage: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy of ``storage`` without credentials."""
    return {key: value for key, value in storage.items() if key not in _CREDENTIALS}


def recorded_storage(path: pathlib.Path, own: Mapping[str, Any] | None = None) -> dict[str, Any] | None:
    """Return the external storage of a checkpoint; None if its files are in ``path``.

    ``path`` is the checkpoint's local directory, whose completion marker names the storage. Without a complete marker the
    result is None. ``own`` is the storage of this run's config. Credentials are copied from ``own`` if both storages have the
    same type and server.
    """
    location = read_marker(path).get(STORAGE_KEY) if is_complete(path) else None
    if location is None or pathlib.Path(location.get("container_path", ""), path.name) == path:
        return None
    # Somebody else may have written the marker: credentials must not be sent to a server that only the marker names.
    is_same_server = own is not None and all(own.get(key) == location.get(key) for key in ("type", *_SERVERS))
    known = own if own is not None and is_same_server else {}
    return {**{key: known[key] for key in _CREDENTIALS if key in known}, **location}


def without_credentials(config: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """Return an experiment config whose ``checkpoint_storage`` has masked credentials."""
    if not config or not isinstance(config.get("checkpoint_storage"), Mapping):
        return None if config is None else dict(config)
    return {**config, "checkpoint_storage": masked(config["checkpoint_storage"], SecretNames())}


def address_of(storage: Mapping[str, Any], storage_id: str = "") -> str:
    """Return a storage's address as text, such as ``s3://bucket/prefix/uuid``."""
    if storage["type"] == "directory":
        return str(pathlib.Path(storage["container_path"], storage_id))
    parts = [
        str(storage.get("bucket") or storage.get("container")),
        str(storage.get("prefix") or ""),
        storage_id,
    ]
    address = f"{_SCHEMES[storage['type']]}://" + "/".join(part.strip("/") for part in parts if part)
    endpoint = storage.get("endpoint_url") or storage.get("account_url")
    return f"{address} at {endpoint}" if endpoint else address


def check(storage: Mapping[str, Any]) -> None:
    """Write, read and delete a test object; raise CheckpointError if that fails."""
    _transfer("check", storage)


def upload(storage: Mapping[str, Any], storage_id: str, source: pathlib.Path, names: Sequence[str]) -> None:
    """Upload files and directories of a checkpoint from the directory ``source``.

    ``names`` are paths relative to ``source``; a directory's path ends with a slash.
    """
    _transfer("upload", storage, storage_id, directory=str(source.absolute()), names=sorted(names))


def download(
    storage: Mapping[str, Any],
    storage_id: str,
    target: pathlib.Path,
    names: Sequence[str] | None = None,
    variables: Mapping[str, str] | None = None,
) -> None:
    """Download a checkpoint's files, or only those in ``names``, into ``target``.

    ``variables`` are further environment variables of the child process, such as credentials.

    Raises:
        CheckpointNotFoundError: the storage has no object of this checkpoint.
        CheckpointError: the download failed.
    """
    wanted = None if names is None else list(names)
    _transfer("download", storage, storage_id, variables, directory=str(target.absolute()), names=wanted)


def delete(
    storage: Mapping[str, Any],
    storage_id: str,
    globs: Sequence[str] = (ALL_FILES,),
    variables: Mapping[str, str] | None = None,
    timeout_s: float | None = None,
) -> dict[str, int]:
    """Delete a checkpoint's files matching ``globs``; return the remaining files.

    By default all files are deleted, the completion marker first. The result maps the path of each remaining file to its size
    in bytes. ``variables`` are further environment variables of the child process, such as credentials.

    Raises:
        CheckpointError: the deletion failed or took longer than ``timeout_s``.
    """
    left: dict[str, int] = _transfer(
        "delete", storage, storage_id, variables, timeout_s=timeout_s, globs=list(globs)
    )
    return left


def _transfer(
    action: str,
    storage: Mapping[str, Any],
    storage_id: str = "",
    variables: Mapping[str, str] | None = None,
    timeout_s: float | None = None,
    **arguments: Any,
) -> Any:
    request = {"action": action, "storage": dict(storage), "storage_id": storage_id, **arguments}
    # `start_new_session`: Ctrl-C and stop signals to the process group must not end an upload. The child exits when its stdin
    # is closed, which also happens when this process dies.
    child = subprocess.Popen(
        [sys.executable, "-m", "dstrial.object_storage"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        # Without ALLOCATION_DIR_VARIABLE, sitecustomize installs no patches; they would record the test object of `check` as a
        # checkpoint being saved.
        env={**{k: v for k, v in os.environ.items() if k != ALLOCATION_DIR_VARIABLE}, **(variables or {})},
        start_new_session=True,
    )
    assert child.stdin is not None
    assert child.stdout is not None
    timer = None if timeout_s is None else threading.Timer(timeout_s, child.kill)
    try:
        if timer is not None:
            timer.start()
        with contextlib.suppress(BrokenPipeError):
            child.stdin.write(json.dumps(request).encode() + b"\n")
            child.stdin.flush()
        lines = child.stdout.read().decode(errors="replace").splitlines()
    finally:
        if timer is not None:
            timer.cancel()
        with contextlib.suppress(BrokenPipeError):
            child.stdin.close()
        child.wait()
        child.stdout.close()
    address = address_of(storage, storage_id) if storage_id else f"checkpoint storage {address_of(storage)}"
    try:
        answer = json.loads(lines[-1])
    except (IndexError, ValueError):
        tail = _without_secrets(lines[-1] if lines else "no output", storage)
        raise CheckpointError(
            f"the {action} of {address} ended with exit code {child.returncode}: {tail}. Try again."
        ) from None
    if "error" not in answer:
        return answer["result"]
    if answer["is_missing"]:
        raise CheckpointNotFoundError(f"{address} has no objects; expected a checkpoint. Name another one.")
    raise CheckpointError(
        f"the {action} of {address} failed: {_without_secrets(answer['error'], storage).rstrip('.')}. Correct "
        "checkpoint_storage, its credentials or its permissions."
    )


def _without_secrets(text: str, storage: Mapping[str, Any]) -> str:
    for secret in secrets_in(storage, SecretNames()):
        text = text.replace(str(secret.value), MASK)
    return text


# ---- the child process -------------------------------------------------------------------------------


def main() -> None:
    request = json.loads(sys.stdin.buffer.readline())
    threading.Thread(target=_exit_with_parent, daemon=True).start()
    logging.disable(logging.CRITICAL)  # the client libraries log headers of requests
    try:
        answer = {"result": _perform(**request)}
    except Exception as error:  # noqa: BLE001 - a process's boundary; the parent raises it
        causes = [error] if error.__cause__ is None else [error, error.__cause__]
        text = ": ".join(f"{type(one).__name__}: {one}" for one in causes)
        answer = {"error": text, "is_missing": type(error).__name__ == "CheckpointNotFound"}
    sys.stdout.write(f"\n{json.dumps(answer)}\n")


def _exit_with_parent() -> None:
    # os.read, because a thread that holds the lock of `sys.stdin` aborts the interpreter's shutdown.
    os.read(sys.stdin.fileno(), 1)
    os._exit(1)


def _perform(
    action: str,
    storage: dict[str, Any],
    storage_id: str,
    directory: str = "",
    names: Sequence[str] | None = None,
    globs: Sequence[str] = (),
) -> Any:
    from determined import errors
    from determined.common import storage as managers

    manager = managers.build(storage, container_path=None)
    if action == "check":
        managers.validate_manager(manager)
    elif action == "upload":
        manager.upload(directory, storage_id, set(names or ()))
    elif action == "download":

        def is_wanted(name: str) -> bool:
            return not name.startswith("../") and (names is None or name in names)

        manager.download(storage_id, directory, is_wanted)
    else:
        is_whole = ALL_FILES in globs
        with contextlib.suppress(errors.CheckpointNotFound):
            if is_whole:
                manager.delete(storage_id, [MARKER_NAME])
            return manager.delete(storage_id, [ALL_FILES] if is_whole else list(globs))
        return {}
    return None


if __name__ == "__main__":
    main()
