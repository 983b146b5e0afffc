"""What every rank of ``checkpoint.py`` does: train a large model and save it in three ways, or load it in another layout."""

from __future__ import annotations

import contextlib
import hashlib
import os
import pathlib
import shutil
import statistics
import threading
import time
from collections.abc import Iterator
from typing import Any

NUM_LAYERS = 8
BATCHES_PER_SAVE = 3
DEADLINE_S = 600.0
_SAMPLE_S = 0.002
_CHUNK_BYTES = 1 << 20


def width(num_parameters: int) -> int:
    """Features of the layers that together have about as many parameters."""
    return max(int((num_parameters / NUM_LAYERS) ** 0.5), 8)


def make_engine(num_parameters: int, zero_stage: int) -> Any:
    """Build an engine of square layers with torch's Adam in fp32. Ranks: all, collectively."""
    import deepspeed
    import torch
    from torch import nn

    torch.manual_seed(3)
    size = width(num_parameters)
    model = nn.Sequential(*(nn.Linear(size, size) for _ in range(NUM_LAYERS)))
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "optimizer": {"type": "Adam", "params": {"lr": 1e-4, "torch_adam": True}},
        "zero_optimization": {"stage": zero_stage},
        "steps_per_print": 1_000_000,
    }
    return deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)[0]


def step(engine: Any, num_parameters: int) -> None:
    """Train one batch. Ranks: all, collectively."""
    import torch

    features = torch.randn(1, width(num_parameters))
    engine.backward(engine(features).square().mean())
    engine.step()


# ---- saving --------------------------------------------------------------------------------------------


def save_in_three_ways(
    run_dir: str, scratch: str, num_parameters: int, num_saves: int, zero_stage: int
) -> Any:
    """Train under dstrial with checkpoints behind the loop; between them save the same engine in the other ways.

    Returns:
        Timings in seconds, of rank 0, and sizes in bytes.

    Ranks: all, collectively.
    """
    import torch
    from determined import core
    from torch.utils.data import TensorDataset

    import dstrial

    rank = int(os.environ["RANK"])
    checkpoints = pathlib.Path(run_dir) / "checkpoints"
    bare, contexts = pathlib.Path(scratch) / "bare", pathlib.Path(scratch) / "determined"
    found: dict[str, Any] = {"bare_s": [], "determined_s": [], "batch_s": [], "batch_while_writing_s": []}
    gaps: dict[int, float] = {}
    completed_s: dict[int, float] = {}
    begun_s: dict[int, float] = {}

    class Trial(dstrial.DeepSpeedTrial):
        def __init__(self, context: Any) -> None:
            self.context = context
            self.engine = context.wrap_model_engine(make_engine(num_parameters, zero_stage))
            self.ended_s = 0.0

        def build_training_data_loader(self) -> Any:
            return dstrial.DataLoader(TensorDataset(torch.zeros(4096, 1)), batch_size=1)

        def build_validation_data_loader(self) -> Any:
            return None

        def train_batch(self, dataloader_iter: Any, epoch_idx: int, batch_idx: int) -> dict[str, Any]:  # noqa: ARG002
            begin_s = time.monotonic()
            if self.ended_s:
                gaps[batch_idx] = begin_s - self.ended_s
            next(dataloader_iter)
            is_writing = any(checkpoints.glob("*.saving"))
            if batch_idx and batch_idx % BATCHES_PER_SAVE == 0:
                begun_s[batch_idx] = self.ended_s
                step(self.engine, num_parameters)
                found["batch_while_writing_s"].append(time.monotonic() - begin_s)
                completed_s[batch_idx] = _wait_until_written(checkpoints) - self.ended_s
                self.context.distributed.allgather(None)
                self._save_otherwise()
            else:
                step(self.engine, num_parameters)
                if not is_writing and batch_idx > 1:
                    found["batch_s"].append(time.monotonic() - begin_s)
            self.ended_s = time.monotonic()
            return {}

        def _save_otherwise(self) -> None:
            begin_s = time.monotonic()
            self.engine.save_checkpoint(str(bare), tag="model0")
            found["bare_s"].append(time.monotonic() - begin_s)
            found["num_bytes"] = sum(path.stat().st_size for path in bare.rglob("*") if path.is_file())
            self._remove(bare)
            begin_s = time.monotonic()
            metadata = {"steps_completed": 1}
            with upstream.checkpoint.store_path(metadata, shard=True) as (path, _):
                self.engine.save_checkpoint(str(path), tag="model0")
            found["determined_s"].append(time.monotonic() - begin_s)
            self._remove(contexts)

        def _remove(self, path: pathlib.Path) -> None:
            self.context.distributed.allgather(None)
            if rank == 0:
                shutil.rmtree(path, ignore_errors=True)
            self.context.distributed.allgather(None)

    config = {"name": "benchmark", "searcher": {"name": "single"}, "checkpoint_storage": _KEEP_ONE}
    with dstrial.init(hparams={}, exp_conf=config, run_dir=run_dir) as context:
        trial = Trial(context)
        upstream = core._context._dummy_init(
            distributed=context.distributed, checkpoint_storage=str(contexts)
        )
        dstrial.Trainer(trial, context).fit(
            max_length=dstrial.Batch(num_saves * BATCHES_PER_SAVE + 2),
            checkpoint_period=dstrial.Batch(BATCHES_PER_SAVE),
            checkpoint_policy="none",
            reporting_period=dstrial.Batch(1_000_000),
        )
    without = statistics.median(gap for idx, gap in gaps.items() if idx % BATCHES_PER_SAVE)
    found["held_s"] = [gap - without for idx, gap in sorted(gaps.items()) if idx % BATCHES_PER_SAVE == 0]
    found["completed_s"] = [completed_s[idx] for idx in sorted(completed_s)]
    return found if rank == 0 else None


_KEEP_ONE = {"save_experiment_best": 0, "save_trial_best": 0, "save_trial_latest": 1}


def _wait_until_written(checkpoints: pathlib.Path) -> float:
    give_up_at_s = time.monotonic() + DEADLINE_S
    while any(checkpoints.glob("*.saving")):
        if time.monotonic() > give_up_at_s:
            raise TimeoutError(f"no checkpoint within {DEADLINE_S:g} s")
        time.sleep(0.005)
    return time.monotonic()


# ---- reshaping -----------------------------------------------------------------------------------------


def save_layout(path: str, num_parameters: int, zero_stage: int) -> Any:
    """Save an engine after one batch; returns its layout as JSON values. Ranks: all, collectively."""
    from dstrial.engine.adapters.factory import adapt
    from dstrial.engine.state import save_engine
    from dstrial.ranks.control_channel import ControlChannel

    with _ranks() as identity:
        engine = make_engine(num_parameters, zero_stage)
        step(engine, num_parameters)
        save_engine(engine, path, "model0")
        return adapt(engine).layout(ControlChannel(identity).allgather).to_json()


def load_layout(path: str, layout: dict[str, Any], num_parameters: int, zero_stage: int) -> Any:
    """Load what ``save_layout`` saved in this layout.

    Returns:
        Seconds of the reshape, its verification included, and anonymous memory of this rank in bytes: before, at the peak
        and after.

    Ranks: all, collectively.
    """
    from dstrial.checkpoint.layout import Layout
    from dstrial.engine.adapters.factory import adapt
    from dstrial.engine.checkpoint_reader.saved_engine import SavedEngine
    from dstrial.engine.reshape import load_reshaped
    from dstrial.ranks.control_channel import ControlChannel

    with _ranks() as identity:
        engine = make_engine(num_parameters, zero_stage)
        channel = ControlChannel(identity)
        now = adapt(engine).layout(channel.allgather)
        channel.allgather(None)
        with _AnonymousMemory() as memory:
            begin_s = time.monotonic()
            load_reshaped(engine, SavedEngine(path, "model0", Layout.from_json(layout), {}), now)
            channel.allgather(None)
            reshape_s = time.monotonic() - begin_s
        return {"reshape_s": reshape_s, **memory.found}


@contextlib.contextmanager
def _ranks() -> Iterator[Any]:
    from dstrial.ranks import process_group
    from dstrial.ranks.identity import identify

    identity = identify(os.environ)
    process_group.init_process_group(identity, timeout_s=DEADLINE_S)
    yield identity
    process_group.shutdown()


class _AnonymousMemory:
    """Samples this process's anonymous memory; pages of mapped files belong to the page cache and are not in it."""

    def __enter__(self) -> _AnonymousMemory:
        before = _anonymous_bytes()
        self.found = {"before_bytes": before, "peak_bytes": before}
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._sample)
        self._thread.start()
        return self

    def _sample(self) -> None:
        while not self._stop.wait(_SAMPLE_S):
            self.found["peak_bytes"] = max(self.found["peak_bytes"], _anonymous_bytes())

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()
        self.found["after_bytes"] = _anonymous_bytes()


def _anonymous_bytes() -> int:
    for line in pathlib.Path("/proc/self/status").read_text(encoding="utf-8").splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    raise OSError("/proc/self/status has no RssAnon; expected Linux 4.5 or later")


def read_and_write(path: str, target: str) -> dict[str, float]:
    """Read the files of a checkpoint, read and write them, and read and hash them; seconds of each, and their size."""
    files = [found for found in pathlib.Path(path).rglob("*") if found.is_file()]
    seconds: dict[str, float] = {"num_bytes": float(sum(found.stat().st_size for found in files))}

    def timed(name: str, digest: Any, writes: bool) -> None:
        begin_s = time.monotonic()
        for idx, found in enumerate(files):
            with contextlib.ExitStack() as stack:
                source = stack.enter_context(found.open("rb"))
                sink = stack.enter_context(pathlib.Path(target, str(idx)).open("wb")) if writes else None
                while chunk := source.read(_CHUNK_BYTES):
                    if sink is not None:
                        sink.write(chunk)
                    if digest is not None:
                        digest.update(chunk)
        seconds[name] = time.monotonic() - begin_s

    timed("read_s", None, writes=False)
    timed("read_and_write_s", None, writes=True)
    timed("verify_s", hashlib.sha256(), writes=False)
    return seconds
