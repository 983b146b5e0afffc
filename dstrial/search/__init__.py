"""Hyperparameter search: create an experiment's trials and stop some trials early.

A searcher receives events and returns actions. It is seeded, can be restored from a snapshot after any event, and does not
access clock, files or network. Its semantics are those of Determined 0.38.1's experiment config v0.
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
