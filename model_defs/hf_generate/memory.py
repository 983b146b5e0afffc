"""Show where ZeRO 3 has put the parameters of a model: a table with a row per rank."""

import pathlib
import resource
from typing import Any

import torch

_MIB = 2**20
_COLUMNS = ("rank", "place", "parameters here", "MiB here", "of the model", "process MiB", "device MiB")


def memory_table(engine: Any, distributed: Any) -> str:
    """Return the table as text on the chief; "" on other ranks.

    Args:
        engine: the DeepSpeed engine of a model that was built under ``deepspeed.zero.Init``.
        distributed: the distributed context of the core context.

    Ranks: all, collectively (one gather).
    """
    places: dict[str, tuple[int, int]] = {}
    num_elements = 0
    for parameter in engine.module.parameters():
        num_elements += parameter.ds_numel
        # This rank's shard. The last shard is padded, so that all have the same length.
        part = parameter.ds_tensor
        location = getattr(part, "final_location", None)
        place = str(getattr(location, "value", location) or part.device)
        num_bytes = part.ds_numel * part.element_size()
        known = places.get(place, (0, 0))
        places[place] = (known[0] + part.ds_numel, known[1] + num_bytes)
    device = torch.accelerator.memory_allocated() if torch.accelerator.is_available() else 0
    rows = distributed.gather((places, _resident_bytes(), device))
    if rows is None:
        return ""
    lines = [_COLUMNS]
    for rank, (of_rank, resident, on_device) in enumerate(rows):
        for place, (num_here, num_bytes) in sorted(of_rank.items()):
            lines.append(
                (
                    str(rank),
                    place,
                    f"{num_here:,}",
                    f"{num_bytes / _MIB:.2f}",
                    f"{num_here / num_elements:.1%}",
                    f"{resident / _MIB:.0f}",
                    f"{on_device / _MIB:.2f}",
                )
            )
    widths = [max(len(line[column_idx]) for line in lines) for column_idx in range(len(_COLUMNS))]
    text = "\n".join(
        "  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)) for line in lines
    )
    return f"a model of {num_elements:,} parameters on {len(rows)} ranks:\n{text}"


def _resident_bytes() -> int:
    """Return the resident memory of this process in bytes."""
    return int(pathlib.Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
