"""Rows for the pictures of the page: experiments as a person has them, each tab of one filled; no processes."""

from __future__ import annotations

import dataclasses

import seeded_tabs
from seeded import add_experiment
from seeded_cluster import add_model, add_past_use, add_search, add_task, add_webhook
from seeded_trials import add_instruments, add_lines, add_runs, task_of

from dstrial.master.store.database import Transaction

NAMES = ("digits", "stdlib lm", "digits gan", "circle", "bert large")
STATES = ("COMPLETED", "COMPLETED", "PAUSED", "ERROR", "CANCELED")
LINES = (
    (0, "INFO", "Step {step}: loss {loss:.4f}, lr 3.1e-04, 812 records/s"),
    (1, "INFO", "Step {step}: waits 3 ms for data"),
    (0, "DEBUG", "bucket of 32 MiB reduced in 4 ms"),
    (1, "WARNING", "Gradient norm 11.4 was clipped to 1.0"),
    (0, None, "100%|##########| 64/64 [00:04<00:00, 14.2it/s]"),
)


@dataclasses.dataclass(frozen=True)
class Shown:
    """What addresses name: a search of 24 trials, its best trial, another experiment, a task, a search of dsat."""

    search: int
    trial: int
    other: int
    task: str
    dsat: str


def fill(tx: Transaction) -> Shown:
    """Add what the pictures show."""
    dsat = add_search(tx, has_report=True)
    for number in range(14):
        name = f"{NAMES[number % 5]} {number // 5 + 1}"
        other = add_experiment(
            tx,
            name=name,
            state=STATES[number % 5],
            num_trials=1 + number % 4,
            seed=number,
            labels=("baseline",)[: number % 2],
        )
    search = add_experiment(
        tx, name="digits, 24 trials", num_trials=24, num_points=60, seed=9, labels=("search",)
    )
    tx.execute("UPDATE experiments SET progress = 1.0 WHERE id = ?", (search,))
    for number in range(56):
        add_past_use(tx, 23.5 - number * 0.39, 0.3 + 0.05 * (number % 7), 1 + number % 2)
    add_task(
        tx, kind="TENSORBOARD", name=f"TensorBoard of experiment {search}", slots=(), experiments=(search,)
    )
    add_task(tx, name="nvidia-smi dmon", slots=(2,), num_slots=1)
    task = add_task(tx, name="evaluate, 8 slots", num_slots=8)
    add_webhook(tx, "ends of experiments")
    _fill_tabs(tx, search, other)
    trial = int(
        tx.execute("SELECT best_trial_id FROM experiments WHERE id = ?", (search,)).fetchone()[
            "best_trial_id"
        ]
    )
    add_runs(tx, trial, [(0, 2, 1, "out of memory"), (200, 2, 0, "preempted"), (400, 4, 0, "")])
    add_instruments(tx, trial, 4)
    for owner, of in ((task_of(tx, trial), trial), (task, None)):
        add_lines(
            tx,
            owner,
            of,
            [
                (rank, level, text.format(step=step, loss=2.3 / (1 + step)))
                for step in range(60)
                for rank, level, text in LINES[: 2 + (step % 5 == 0) * 3]
            ],
        )
    best = seeded_tabs.add_checkpoint(tx, search, trial, 600)
    add_model(tx, "digits", best, labels=("vision",))
    # The two experiments of every test: begun a while ago.
    tx.execute(
        "UPDATE experiments SET name = 'finetune ' || id, start_us = (SELECT MAX(start_us) FROM experiments) WHERE id < 3"
    )
    tx.execute(
        "UPDATE allocations SET start_us = (SELECT MAX(start_us) FROM experiments), is_ready = 1 WHERE start_us = 1"
    )
    tx.execute(
        "UPDATE checkpoints SET report_us = (SELECT MAX(start_us) FROM experiments) WHERE report_us = 1"
    )
    tx.execute("UPDATE trials SET start_us = (SELECT MAX(start_us) FROM experiments) WHERE start_us = 1")
    return Shown(search, trial, other, task, dsat)


def _fill_tabs(tx: Transaction, search: int, other: int) -> None:
    for experiment, rate in ((search, 1), (other, 2)):
        seeded_tabs.give_files(
            tx,
            experiment,
            {
                "train.py": f"import torch\n\nRATE = {rate}\n{seeded_tabs.TRAIN}",
                "ds.json": '{"train_batch_size": 64}\n',
                "data/README": "digits, 8 by 8\n",
            },
        )
        seeded_tabs.give_config(
            tx, experiment, seeded_tabs.CONFIG_TEXT, deepspeed_config=seeded_tabs.DEEPSPEED
        )
    seeded_tabs.make_halving(tx, search)
    for trial, _ in seeded_tabs.trials_of(tx, search)[:6]:
        for steps in (200, 400):
            seeded_tabs.add_checkpoint(tx, search, trial, steps)
    tx.execute(
        "UPDATE experiments SET notes = 'The learning rate decides; try 1e-3 to 5e-3 next.' WHERE id = ?",
        (search,),
    )
