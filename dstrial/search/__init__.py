"""Search methods: create an experiment's trials and stop some of them early.

A searcher receives events and returns actions. It is deterministic: seeded, restorable from a snapshot after any event, and
without access to clock, files or network. The semantics are those of Determined 0.38.1's experiment config v0.
"""

from dstrial.search.method import Action, Create, ExitReason, PreviewedTrials, Shutdown, Stop
from dstrial.search.searcher import Searcher, SearchSummary, preview

__all__ = [
    # a search
    "Action",
    "Create",
    "ExitReason",
    "Searcher",
    "Shutdown",
    "Stop",
    # preview, without trials
    "PreviewedTrials",
    "SearchSummary",
    "preview",
]
