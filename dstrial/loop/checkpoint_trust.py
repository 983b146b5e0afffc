"""Whether the files of a checkpoint may be loaded; ranks decide together.

Files with only values and listed classes are loaded. Others are loaded if their exact content is vouched for: by this
account's signature on the manifest; by the master, to which the trial reported the manifest's SHA-256; or by the user, with
that SHA-256 in ``data.dstrial.trust_checkpoint_code``. A matching manifest alone proves nothing: anybody can make one.
"""

from __future__ import annotations

import hashlib
import json
import logging
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

from determined import core

from dstrial.checkpoint.manifest import (
    MANIFEST_DIGEST,
    MANIFEST_NAME,
    hash_file,
    hash_files,
    is_own_manifest,
    share_of,
)
from dstrial.config.dotted_keys import dstrial_section
from dstrial.engine.checkpoint_reader.safe_load import may_be_unpickled, unlisted_in, untrusted

logger = logging.getLogger("dstrial.loop")

TRUST_KEY = "trust_checkpoint_code"
"""Key of ``data.dstrial``: the SHA-256 of the checkpoint whose code the user trusts."""


def trusts_code(
    context: core.Context,
    uuid: str,
    root: pathlib.Path,
    names: Sequence[str],
    exp_conf: Mapping[str, Any] | None,
) -> bool:
    """Return whether loading may run code that the files name; False if none does.

    The files of the manifest, where there is one, have been compared with it. Files beside them are scanned too, because a
    library may load whatever lies in the directory. ``names`` are relative to ``root`` and the same on all ranks.

    Raises:
        UntrustedCheckpointError: the files name code and nobody vouches for them.

    Ranks: all, collectively.
    """
    distributed = context.distributed
    pickles = sorted(name for name in names if may_be_unpickled(name))
    strays = _strays(root, names)
    mine = share_of(pickles, distributed.local_rank, distributed.local_size)
    mine = [*mine, *share_of(strays, distributed.local_rank, distributed.local_size)]
    found: dict[str, tuple[str, ...]] = {}
    for part in distributed.allgather(unlisted_in(root, mine)):
        found.update(part)
    if not found:
        return False
    # Nobody vouches for a file that the manifest does not list.
    unknown = {f"checkpoint {root}: {name}": found[name] for name in sorted(found.keys() - set(names))}
    if unknown:
        raise untrusted(unknown, "The checkpoint's manifest does not list the file: delete it.")
    voucher, digest = None, None
    if distributed.rank == 0:
        digest = checkpoint_digest(root, pickles)
        voucher = _voucher(context, uuid, root, digest, exp_conf)
    voucher, digest = distributed.broadcast((voucher, digest))
    if voucher is None:
        raise untrusted(
            {
                f"checkpoint {root}: {name}" if not idx else name: found[name]
                for idx, name in enumerate(sorted(found))
            },
            "If you trust who wrote it, add --trust-code to `dstrial run --resume`, or write "
            f"data: {{dstrial: {{{TRUST_KEY}: {digest}}}}} into the experiment config.",
        )
    if distributed.rank == 0:
        logger.info("checkpoint %s holds objects of classes of its own, and is loaded: %s", uuid, voucher)
    return True


def _strays(root: pathlib.Path, listed: Sequence[str]) -> list[str]:
    """Return files that may be unpickled and that the manifest does not list."""
    if not (root / MANIFEST_NAME).is_file():
        return []
    present = {path.relative_to(root).as_posix() for path in root.rglob("*") if path.is_file()}
    return sorted(name for name in present - set(listed) if may_be_unpickled(name))


def checkpoint_digest(root: pathlib.Path, names: Sequence[str]) -> str:
    """Return the SHA-256 of the manifest, else of the checksums of ``names``."""
    if (root / MANIFEST_NAME).is_file():
        return hash_file(root / MANIFEST_NAME).sha256
    sums = {name: entry.sha256 for name, entry in hash_files(root, sorted(names)).items()}
    return hashlib.sha256(json.dumps(sums, sort_keys=True).encode()).hexdigest()


def _voucher(
    context: core.Context, uuid: str, root: pathlib.Path, digest: str, exp_conf: Mapping[str, Any] | None
) -> str | None:
    """Return who vouches for the files, for the log; None if nobody does."""
    if dstrial_section(exp_conf).get(TRUST_KEY) == digest:
        return f"data.dstrial.{TRUST_KEY} says so"
    if not (root / MANIFEST_NAME).is_file():
        return None
    if is_own_manifest(root):
        return "this account has written it"
    # A directory holds its metadata itself: whoever made the directory can write anything there.
    if context.info is not None and not pathlib.Path(uuid).is_absolute():
        metadata = context.checkpoint.get_metadata(uuid)
        if metadata.get(MANIFEST_DIGEST) == digest:
            return "the master knows it as what a trial of its own has written"
    return None
