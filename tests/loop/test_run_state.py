"""Snapshots and checkpoint state of user reducers; deprecated callbacks."""

import threading

import pytest
import torch
from determined import pytorch

from dstrial.loop.callbacks import Callbacks
from dstrial.loop.run_state import Snapshot, reducer_state, restore_reducer


class Holding:
    def __init__(self):
        self.lock = threading.Lock()
        self.model = torch.nn.Linear(2, 2)
        self.values = [1]
        self.fn = lambda values: values


def test_snapshot_restores_values_and_keeps_uncopyable_objects():
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


def test_reducer_state_excludes_models_functions_and_locks(caplog):
    reducer = Holding()
    state = reducer_state(reducer)
    assert state == {"values": [1]}
    assert "Holding.lock cannot be checkpointed" in caplog.text
    fresh = Holding()
    fresh.values = []
    restore_reducer(fresh, state)
    assert fresh.values == [1]


def test_deprecated_callback_warns_once():
    class Old(pytorch.PyTorchCallback):
        def on_checkpoint_end(self, checkpoint_dir):
            del checkpoint_dir

    with pytest.warns(FutureWarning, match="use on_checkpoint_write_end") as caught:
        Callbacks({"new": pytorch.PyTorchCallback(), "old": Old(), "older": Old()})
    assert len(caught) == 1
