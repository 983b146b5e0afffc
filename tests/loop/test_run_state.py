"""A user's reducers are kept aside and checkpointed whatever they hold."""

import threading

import torch

from dstrial.loop.run_state import Snapshot, reducer_state, restore_reducer


class Holding:
    def __init__(self):
        self.lock = threading.Lock()
        self.model = torch.nn.Linear(2, 2)
        self.values = [1]
        self.fn = lambda values: values


def test_a_snapshot_restores_values_and_keeps_what_cannot_be_copied():
    reducer = Holding()
    lock, model = reducer.lock, reducer.model
    snapshot = Snapshot([reducer])
    reducer.values.append(2)
    reducer.new = 1
    snapshot.restore()
    assert reducer.values == [1]
    assert not hasattr(reducer, "new")
    assert reducer.lock is lock
    assert reducer.model is model


def test_a_checkpoint_holds_state_and_leaves_models_functions_and_locks_to_the_trial(caplog):
    reducer = Holding()
    state = reducer_state(reducer)
    assert state == {"values": [1]}
    assert "Holding.lock cannot be checkpointed" in caplog.text
    fresh = Holding()
    fresh.values = []
    restore_reducer(fresh, state)
    assert fresh.values == [1]
