"""Scenarios of background saving, run on ranks by ``forked_ranks``.

Every scenario trains the small trial in new processes; some block the thread that writes checkpoints.
"""

import json
import os
import pathlib
import signal
import time

DEADLINE_S = 60.0


def wait_for(path):
    """Wait until a file exists."""
    give_up_at_s = time.monotonic() + DEADLINE_S
    while not path.exists():
        if time.monotonic() > give_up_at_s:
            raise OSError(f"{path.name} never came")
        time.sleep(0.01)


def hold_writer(until):
    """Block this rank's checkpoint writer until a file exists, like hung storage."""
    from dstrial.engine.snapshot import StateCopies

    write = StateCopies.write

    def write_later(self):
        wait_for(until)
        write(self)

    StateCopies.write = write_later


def fit(
    run_dir, at_batch=lambda context, batch_idx: None, callback=None, background=True, stage=1, **arguments
):
    """Train the small trial; return the result of ``Trainer.fit`` or its exception."""
    import small_trials
    from small_runs import deepspeed_config

    from dstrial import Batch, Trainer, init

    class Trial(small_trials.DataParallelTrial):
        def disturb(self, batch_idx):
            at_batch(self.context, batch_idx)

        def build_callbacks(self):
            return {} if callback is None else {"own": callback(self.context)}

    config = {
        "name": "saving",
        "searcher": {"name": "single", "metric": "validation_loss"},
        "reproducibility": {"experiment_seed": 3},
        "data": {"dstrial": {"background_saving": background}},
    }
    arguments = {
        "max_length": Batch(8), "checkpoint_period": Batch(2), "checkpoint_policy": "none", **arguments,
    }  # fmt: skip
    with init(
        hparams={"deepspeed_config": deepspeed_config(stage)}, exp_conf=config, run_dir=run_dir
    ) as context:
        trainer = Trainer(Trial(context), context)
        try:
            return trainer.fit(**arguments)
        except Exception as error:  # noqa: BLE001  # returned to the test
            return error


def steps_in(run_dir):
    """Return the numbers of trained batches of the complete checkpoints."""
    marks = pathlib.Path(run_dir).glob("checkpoints/*/COMPLETE")
    return sorted(json.loads(mark.read_text())["steps_completed"] for mark in marks)


def train_while_the_storage_hangs(run_dir, scratch):
    """Block the writer of the checkpoint at batch 2 until the fourth batch begins."""
    released = pathlib.Path(scratch) / "released"
    hold_writer(released)
    seen = []

    def at_batch(context, batch_idx):
        if batch_idx == 3 and context.distributed.rank == 0:
            seen.append(steps_in(run_dir))
            released.touch()

    result = fit(run_dir, at_batch)
    return seen[:1], repr(result), steps_in(run_dir)


def let_one_rank_fail_to_write(run_dir, _scratch):
    """Make rank 1's file of the second checkpoint unwritable and keep training."""
    from dstrial import Batch, PyTorchCallback

    class InTheWay(PyTorchCallback):
        def __init__(self, context):
            self.rank = context.distributed.rank
            self.uuids = []

        def on_checkpoint_save_start(self, checkpoint):
            if checkpoint["progress"]["batches_trained"] == 4 and self.rank == 1:
                (saving,) = pathlib.Path(run_dir).glob("checkpoints/*.saving")
                saving.with_suffix("").joinpath("dstrial_rank1.pt").mkdir()

        def on_checkpoint_upload_end(self, uuid):
            self.uuids.append(uuid)

    made = []
    batches = []

    def callback(context):
        made.append(InTheWay(context))
        return made[-1]

    result = fit(
        run_dir,
        lambda _, batch_idx: batches.append(batch_idx),
        callback,
        max_length=Batch(10_000),
        checkpoint_period=Batch([2, 4]),
    )
    return type(result).__name__, str(result), made[0].uuids, max(batches)


def fail_at_the_end(run_dir, _scratch):
    """Make rank 1's file of the last checkpoint unwritable."""
    from dstrial import Batch, PyTorchCallback

    class InTheWay(PyTorchCallback):
        def on_checkpoint_save_start(self, checkpoint):
            if int(os.environ["RANK"]) == 1:
                (saving,) = pathlib.Path(run_dir).glob("checkpoints/*.saving")
                saving.with_suffix("").joinpath("dstrial_rank1.pt").mkdir()

    result = fit(run_dir, callback=lambda _: InTheWay(), max_length=Batch(3), checkpoint_period=None)
    return type(result).__name__, str(result)


def die_while_writing(run_dir, scratch):
    """Kill rank 1 at batch 5 while its file of the checkpoint at batch 4 is pending."""
    from dstrial import Batch

    never = pathlib.Path(scratch) / "never"

    def at_batch(context, batch_idx):
        if batch_idx == 3 and context.distributed.rank == 1:
            hold_writer(never)
        if batch_idx == 5 and context.distributed.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)

    return repr(fit(run_dir, at_batch, checkpoint_period=Batch([2, 4])))


def raise_while_writing(run_dir, scratch):
    """Raise in user code at batch 5 while the checkpoint at batch 4 is written."""
    from dstrial import Batch

    released = pathlib.Path(scratch) / "released"
    hold_writer(released)

    def at_batch(_, batch_idx):
        if batch_idx == 5:
            released.touch()
            raise KeyError("mine")

    return type(fit(run_dir, at_batch, checkpoint_period=Batch([4]))).__name__, steps_in(run_dir)


def engines_written_twice(_run_dir, scratch):
    """Compare direct saves with snapshots that are written after the state changes."""
    import deepspeed
    import torch
    from small_models_for_saving import KINDS, make_engine, train_step

    from dstrial.engine.snapshot import HostBuffers, StateCopies, copy_engine
    from dstrial.engine.state import save_engine

    results = {}
    for kind in KINDS:
        torch.manual_seed(1)
        engine = make_engine(kind)
        buffers = HostBuffers()
        differing = []
        num_files = 0
        for save_idx in range(2):
            train_step(engine, save_idx)
            at_once = pathlib.Path(scratch) / kind / f"{save_idx}" / "at once"
            copied = pathlib.Path(scratch) / kind / f"{save_idx}" / "copied"
            save_engine(engine, at_once, "model0")
            copies = StateCopies(buffers)
            copy_engine(engine, copied, "model0", copies)
            assert not list(copied.rglob("*_states.pt")), "written before it was asked for"
            train_step(engine, 10 + save_idx)
            copies.write()
            deepspeed.comm.barrier()
            for path in sorted(at_once.rglob("*")):
                if path.is_file():
                    num_files += 1
                    twin = copied / path.relative_to(at_once)
                    if not twin.is_file() or twin.read_bytes() != path.read_bytes():
                        differing.append(str(path.relative_to(scratch)))
            deepspeed.comm.barrier()
        results[kind] = (num_files, differing)
    return results


SCENARIOS = {
    "storage hangs": (train_while_the_storage_hangs, 2),
    "one rank fails": (let_one_rank_fail_to_write, 2),
    "end fails": (fail_at_the_end, 2),
    "rank dies": (die_while_writing, 2),
    "user code fails": (raise_while_writing, 1),
    "written twice": (engines_written_twice, 2),
}


def main(fork_ranks, asked):
    """Yield what the ranks of every scenario return."""
    from dstrial.testing.ranks import rank_environ

    for name, (scenario, num_ranks) in SCENARIOS.items():
        scratch = pathlib.Path(asked["scratch"]) / name
        scratch.mkdir()

        def body(rank, scenario=scenario, num_ranks=num_ranks, name=name, scratch=scratch):
            os.environ.update(rank_environ(rank, num_ranks, 1))
            os.environ["DSTRIAL_TIMEOUT_S"] = "60"
            return scenario(asked["run_dirs"][name], str(scratch))

        yield name, fork_ranks(num_ranks, body, scratch)
