"""Searchers: which trials an experiment runs, how, and which of them stop early.

Events go in, actions come out. Everything is seeded, a snapshot after any event restores the rest of the search exactly,
and nothing here reads a clock, a file or a network. The semantics are those of Determined 0.38.1's experiment config v0.
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
    # without trials
    "PreviewedTrials",
    "SearchSummary",
    "preview",
]
