"""Names of a checkpoint's files, and the layouts in its manifest."""

from __future__ import annotations

import os
import pathlib
import re
from collections.abc import Iterable

from dstrial import __version__
from dstrial.checkpoint.layout import Layout
from dstrial.checkpoint.manifest import Manifest
from dstrial.errors import CheckpointDamagedError, CheckpointError

_ENGINE = re.compile(r"(model(\d+)|pytorch_model(?:_(\d+))?|global_step\d+)/.+")


def rank_state_name(rank: int) -> str:
    return f"dstrial_rank{rank}.pt"


def engine_folder(paths: Iterable[str], engine_idx: int) -> str:
    """Return the folder (DeepSpeed tag) that has an engine's files in a checkpoint.

    ``DeepSpeedTrial.save`` writes engine *i* to ``model<i>``, Accelerate to ``pytorch_model`` or ``pytorch_model_<i>``, the
    Hugging Face Trainer to ``global_step<n>``. The default is ``model<i>``. ``paths`` are the checkpoint's files.

    Source: accelerate 1.15 ``Accelerator.save_state``; transformers 5.23 ``Trainer._save_checkpoint``.
    """
    for path in sorted(paths):
        found = _ENGINE.fullmatch(path)
        if found is not None and int(found[2] or found[3] or 0) == engine_idx:
            return found[1]
    return f"model{engine_idx}"


def layouts_of(manifest: Manifest, root: str | os.PathLike[str]) -> tuple[Layout, ...]:
    """Return each engine's layout from a manifest.

    Raises:
        CheckpointError: the layouts are of another release; the message names ``root``.
        CheckpointDamagedError: a layout names a folder outside of the checkpoint.
    """
    try:
        layouts = tuple(Layout.from_json(values) for values in manifest.layouts)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise CheckpointError(
            f"checkpoint {root} describes its layout in another form ({error}); expected that of dstrial "
            f"{__version__}. Use the release that wrote it."
        ) from error
    for layout in layouts:
        folder = pathlib.PurePosixPath(layout.folder)
        if folder.is_absolute() or ".." in folder.parts:
            raise CheckpointDamagedError(
                f"checkpoint {root} has an engine in {layout.folder!r}, outside of the checkpoint; expected a folder of it. Use "
                "another checkpoint."
            )
    return layouts
