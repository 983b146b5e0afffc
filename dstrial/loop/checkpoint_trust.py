"""Whether the files of a checkpoint may be loaded; all ranks decide together.

What holds only values and listed classes is loaded, whoever wrote it. Anything else is loaded if somebody vouches for these very
files: this account, whose signature the manifest bears; the master, to which the trial that wrote them reported the manifest's
SHA-256; or the user, by the same SHA-256 in ``data.dstrial.trust_checkpoint_code``. A manifest that matches its files vouches
for nothing: everybody can make one. No rank loads a file before the decision.
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
    """Say whether loading the files may run code that they name.

    Args:
        context: of the trial.
        uuid: of the checkpoint, or its directory.
        root: its directory, every file compared with the manifest where there is one.
        names: of its files, relative to it, the same on all ranks.
        exp_conf: the experiment config.

    Returns:
        False where they hold nothing that could; True where they do and somebody vouches for them.

    Raises:
        UntrustedCheckpointError: they do, and nobody does; names files and classes.

    Ranks: all, collectively (one ``allgather``; a broadcast more where they do).
    """
    distributed = context.distributed
    pickles = sorted(name for name in names if may_be_unpickled(name))
    mine = share_of(pickles, distributed.local_rank, distributed.local_size)
    found: dict[str, tuple[str, ...]] = {}
    for part in distributed.allgather(unlisted_in(root, mine)):
        found.update(part)
    if not found:
        return False
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


def checkpoint_digest(root: pathlib.Path, names: Sequence[str]) -> str:
    """Return the SHA-256 of the manifest, else of the checksums of ``names``.

    Raises:
        OSError: a file cannot be read.
    """
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
