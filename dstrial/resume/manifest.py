"""Read the parts of a checkpoint that a resumed run's config is compared with."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from dstrial.checkpoint.manifest import read_manifest
from dstrial.errors import CheckpointDamagedError
from dstrial.resume.metadata import EngineRecord, SavedRun

METADATA_NAME = "metadata.json"
"""File name of a checkpoint's metadata, Determined's."""

_NOT_IN_LAYOUTS = ("given", "micro_batch_limit")


def read_saved_run(directory: str | os.PathLike[str]) -> SavedRun:
    """Return what a checkpoint's manifest and metadata say of its run."""
    root = Path(directory)
    manifest = read_manifest(root)
    metadata = _metadata(root / METADATA_NAME)
    more = metadata.get("engines")
    extras: list[dict[str, Any]] = more if isinstance(more, list) else []
    try:
        engines = tuple(
            EngineRecord.from_layout(
                layout, {key: value for key, value in extra.items() if key in _NOT_IN_LAYOUTS}
            )
            for layout, extra in zip(
                manifest.layouts, [*extras, *([{}] * len(manifest.layouts))], strict=False
            )
        )
    except (KeyError, TypeError, AttributeError) as error:
        raise CheckpointDamagedError(
            f"{root} describes its layout in another form ({error}); expected that of this release. Resume with the release "
            "that wrote it."
        ) from error
    trial_id = metadata.get("trial_id")
    return SavedRun(
        checkpoint=root.name,
        steps_completed=manifest.steps_completed,
        trial_id=trial_id if isinstance(trial_id, int) else None,
        engines=engines,
    )


def _metadata(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise CheckpointDamagedError(
            f"{path} is no JSON ({error}); expected the checkpoint's metadata. Resume from another checkpoint."
        ) from error
    return value if isinstance(value, dict) else {}
