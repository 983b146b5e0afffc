"""What the trial side of dsat asks of Determined is there in its oldest release with a DeepSpeed autotuner, too."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

DSAT = Path(__file__).resolve().parents[3] / "dstrial" / "dsat"

NAMES_OF_0_23 = {
    "det": {"ClusterInfo", "RendezvousInfo", "TrialInfo", "_info", "get_cluster_info"},
    "core": {
        *("Context", "DistributedContext", "DummyDistributedContext", "PreemptMode", "Unit"),
        *("_dummy_init", "init"),
    },
    "context": {"checkpoint", "preempt", "train"},
    "train": {"report_validation_metrics"},
    "checkpoint": {"store_path"},
    "preempt": {"should_preempt"},
    "op": {"report_completed"},
}
"""What dsat uses of ``determined==0.23.0``, ``core.Context``'s parts among them; look there before a name is added."""

ROOTS = {
    "det": "det",
    "core": "core",
    "core_context": "context",
    "_core": "context",
    "_core_context": "context",
    "op": "op",
}


def test_ranks_use_only_names_of_the_core_api_that_determined_0_23_has() -> None:
    used = {
        name for folder in ("rank", "worker") for path in (DSAT / folder).glob("*.py") for name in _used(path)
    }

    assert ("train", "report_validation_metrics") in used
    assert ("op", "report_completed") in used
    assert not {f"{owner}.{name}" for owner, name in used if name not in NAMES_OF_0_23.get(owner, ())}


def _used(path: Path) -> Iterator[tuple[str, str]]:
    """Yield every attribute of something of Determined's, with what it is an attribute of."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if not isinstance(node, ast.Attribute):
            continue
        chain = _chain(node)
        for idx, word in enumerate(chain[:-1]):
            owner = ROOTS.get(word)
            # ``self.core`` and its like are other things; a core context may be an attribute.
            if owner is None or (idx and owner != "context"):
                continue
            yield owner, chain[idx + 1]
            if owner == "context" and len(chain) > idx + 2:
                yield chain[idx + 1], chain[idx + 2]


def _chain(node: ast.expr) -> list[str]:
    """Return the words of ``a.b.c``; empty for anything else."""
    if isinstance(node, ast.Name):
        return [node.id]
    if not isinstance(node, ast.Attribute):
        return []
    below = _chain(node.value)
    return [*below, node.attr] if below else []
