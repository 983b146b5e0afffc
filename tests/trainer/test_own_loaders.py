"""Loaders other than dstrial.DataLoader: repetition, resume, detected mistakes."""

import itertools
import os
import sys

import pytest
import torch
from in_process_fits import EXP_CONF, fit, values
from small_runs import deepspeed_config, experiment, train
from stream_records import Shared, Stateful, as_pair, hugging_face
from torch.utils import data
from torchdata.stateful_dataloader import StatefulDataLoader
from torchdata.stateful_dataloader.sampler import StatefulDistributedSampler

from dstrial import Batch, DataLoader
from dstrial.errors import DataError
from dstrial.local.run_directory import LOCAL_ID, REWRITE_VARIABLE
from dstrial.testing.ranks import run_function

pytestmark = [pytest.mark.ranks, pytest.mark.usefixtures("definitions_and_runs")]

COUNT = 28  # records: 7 micro batches per pass; a batch has 2 micro batches


def stateful_loader(dataset, **options):
    return StatefulDataLoader(dataset, batch_size=4, **options)


def torch_loader(dataset, **options):
    return data.DataLoader(dataset, batch_size=4, **options)


def shuffled_by_generator(records, build=torch_loader):
    return build(records, shuffle=True, generator=torch.Generator().manual_seed(4))


def stateful_by_sampler(records):
    return stateful_loader(records, sampler=StatefulDistributedSampler(records, 1, 0, shuffle=True))


def streaming(**options):
    pytest.importorskip("datasets")
    return hugging_face(COUNT, **options)


def endless():
    return itertools.cycle(torch_loader(Shared(COUNT)))


def records():
    return Shared(COUNT).records


WORKERS = {"num_workers": 2}
LOADERS = {
    "iterable": lambda: torch_loader(Shared(COUNT)),
    "iterable, two workers": lambda: torch_loader(Shared(COUNT), **WORKERS),
    "stateful data set": lambda: torch_loader(Stateful(COUNT)),
    "shuffled": lambda: torch_loader(records(), shuffle=True),
    "shuffled by a generator": lambda: shuffled_by_generator(records()),
    "shuffled, persistent workers": lambda: torch_loader(
        records(), shuffle=True, persistent_workers=True, **WORKERS
    ),
    "list": lambda: list(torch_loader(records())),
    "endless": endless,
    "StatefulDataLoader, shuffled": lambda: stateful_loader(records(), shuffle=True),
    "StatefulDataLoader, generator": lambda: shuffled_by_generator(records(), stateful_loader),
    "StatefulDataLoader, sampler": lambda: stateful_by_sampler(records()),
    "StatefulDataLoader, iterable": lambda: stateful_loader(Shared(COUNT)),
    "StatefulDataLoader, stateful": lambda: stateful_loader(Stateful(COUNT)),
    "StatefulDataLoader, workers": lambda: stateful_loader(records(), shuffle=True, **WORKERS),
    "streaming": lambda: torch_loader(streaming(), collate_fn=as_pair),
    "streaming, StatefulDataLoader": lambda: stateful_loader(streaming(), collate_fn=as_pair),
    "streaming, StatefulDataLoader, workers": lambda: stateful_loader(
        streaming(), collate_fn=as_pair, **WORKERS
    ),
}


def trial_of(build, seen=None, **members):
    from stream_trials import OwnLoader

    def train_batch(self, items, epoch_idx, batch_idx):
        def noted():
            for item in items:
                if seen is not None:
                    seen.append(item[0])
                yield item

        return OwnLoader.train_batch(self, noted(), epoch_idx, batch_idx)

    return type(
        "Streamed",
        (OwnLoader,),
        {"build_training_data_loader": lambda self: build(), "train_batch": train_batch, **members},
    )


def fit_to(batches, build, seen=None, resume_data=None, **arguments):
    conf = {**EXP_CONF, "data": {"dstrial": {"resume_data": resume_data}}} if resume_data else EXP_CONF
    trial = trial_of(build, seen)
    return fit(trial, exp_conf=conf, max_length=Batch(batches), reporting_period=Batch(1), **arguments)


def resumed(first, batches, build, seen=None, **arguments):
    return fit_to(batches, build, seen, run_dir=first.directory.path, latest_checkpoint="latest", **arguments)


def run_whole_and_parts(kind, stop):
    """Return (reports, records) of an uninterrupted and of a resumed run."""
    build = LOADERS[kind]
    seen, seen_in_parts = [], []
    whole = fit_to(9, build, seen)
    again = resumed(fit_to(stop, build, seen_in_parts), 9, build, seen_in_parts)
    return [
        (values(done.rows("training")), torch.cat(records).tolist())
        for done, records in ((whole, seen), (again, seen_in_parts))
    ]


@pytest.mark.exhaustive(
    *(f"[{kind}-5]" for kind in LOADERS if "workers" not in kind),
    *("[shuffled-6]", "[list-6]", "[StatefulDataLoader, sampler-6]", "[StatefulDataLoader, workers-5]"),
)
@pytest.mark.parametrize("stop", [5, 6])
@pytest.mark.parametrize("kind", LOADERS)
def test_resume_equals_uninterrupted_run_bitwise(kind, stop):
    if "streaming" in kind:
        pytest.importorskip("datasets")
    # Forked loader workers may crash if threads of earlier tests are alive, hence a new process.
    if "workers" in kind:
        path = {"PYTHONPATH": os.pathsep.join(sys.path)}
        whole, parts = run_function(run_whole_and_parts, 1, kind, stop, env=path, deadline_s=300)[0].value
    else:
        whole, parts = run_whole_and_parts(kind, stop)
    assert parts == whole


@pytest.mark.parametrize("kind", ["iterable", "StatefulDataLoader, stateful", "streaming"])
def test_loader_without_length_repeats_every_record(kind):
    seen = []
    fit_to(7, LOADERS[kind], seen)
    first, second = torch.cat(seen[:7]).tolist(), torch.cat(seen[7:14]).tolist()
    assert sorted(first) == sorted(second) == sorted(records().features.tolist())


def test_hugging_face_map_dataset_resumes_bitwise():
    datasets = pytest.importorskip("datasets")
    columns = {"features": records().features.tolist(), "targets": records().targets.tolist()}

    def build():
        rows = datasets.Dataset.from_dict(columns).with_format("torch")
        return DataLoader(rows, batch_size=4, shuffle=True, collate_fn=as_pair)

    seen = []
    whole = fit_to(6, build, seen)
    assert sorted(torch.cat(seen[:8]).tolist()) == sorted(records().features.tolist())
    assert values(resumed(fit_to(4, build), 6, build).rows("training")) == values(whole.rows("training"))


def test_reread_resumes_shuffle_buffer_bitwise():
    def build():
        return torch_loader(streaming(buffer=12), collate_fn=as_pair)

    whole = fit_to(9, build)
    again = resumed(fit_to(5, build), 9, build, resume_data="reread")
    assert values(again.rows("training")) == values(whole.rows("training"))


def test_non_repeating_loader_is_named(caplog):
    seeds = itertools.count()

    def build():
        generator = torch.Generator().manual_seed(next(seeds))
        order = torch.randperm(COUNT, generator=generator).tolist()
        return torch_loader(data.Subset(records(), order))

    resumed(fit_to(5, build), 6, build)
    assert "does not repeat itself: pass 1 begins with another micro batch" in caplog.text


def test_batch_modified_by_training_counts_as_equal(caplog):
    from stream_trials import OwnLoader

    def train_batch(self, items, epoch_idx, batch_idx):
        def changed():
            for item in items:
                taken = tuple(part.clone() for part in item)
                item[0].zero_()
                item.pop()
                yield taken

        return OwnLoader.train_batch(self, changed(), epoch_idx, batch_idx)

    trial = trial_of(lambda: torch_loader(records()), train_batch=train_batch)
    first = fit(trial, max_length=Batch(5))
    fit(trial, run_dir=first.directory.path, latest_checkpoint="latest", max_length=Batch(6))
    assert "does not repeat itself" not in caplog.text


@pytest.mark.parametrize("says", [20, 40])
def test_wrong_length_of_iterable_is_named(says, caplog):
    class Sized(Shared):
        def __len__(self):
            return says

    def build():
        return torch_loader(Sized(COUNT))

    if says > COUNT:
        with pytest.raises(DataError, match="has a length of 10 micro batches and ended after 7"):
            fit_to(9, build)
    else:
        fit_to(9, build)
        assert "has more micro batches than its length of 5" in caplog.text


def test_other_loader_kind_is_refused_at_resume():
    first = fit_to(5, lambda: torch_loader(records()))
    hparams = {"num_records": COUNT, "drop_last": True}
    with pytest.raises(DataError, match="written with a training loader that is not dstrial"):
        fit(hparams=hparams, run_dir=first.directory.path, latest_checkpoint="latest", max_length=Batch(6))


def test_invalid_resume_data_is_rejected():
    with pytest.raises(ValueError, match="resume_data is 'again'; expected exact, reread or restart"):
        fit_to(1, LOADERS["iterable"], resume_data="again")


def test_validation_loader_without_length_is_counted():
    def zero_answer(self, items, batch_idx):
        _, targets = next(items)
        return {"validation_loss": (targets**2).mean()}

    def fitted(build):
        trial = trial_of(
            LOADERS["iterable"],
            build_validation_data_loader=lambda self: build(),
            evaluate_batch=zero_answer,
        )
        return fit(trial, max_length=Batch(2))

    done = fitted(lambda: torch_loader(Shared(22)))
    expected = float((Shared(22).records.targets ** 2).mean())
    assert done.rows("validation")[2]["validation_loss"] == pytest.approx(expected, rel=1e-5)
    with pytest.raises(DataError, match="validation loader is an iterator without __len__"):
        fitted(lambda: iter(torch_loader(Shared(22))))


def run(tmp_path, trial, batches, ranks, run=None, resume_data=None, records=80, env=None, **hparams):
    config = deepspeed_config(1, gradient_accumulation_steps=4 if trial == "Pipeline" else 4 // ranks)
    hyperparameters = {"deepspeed_config": config, "num_records": records, "dropout": 0.0, **hparams}
    own = {"data": {"dstrial": {"resume_data": resume_data}}} if resume_data else {}
    described = experiment(
        hyperparameters, batches, report=1, entrypoint=f"stream_trials:{trial}", checkpoint=100, **own
    )
    return train(tmp_path, trial, described, ranks=ranks, run=run, env=env, module="stream_trials")


def losses(done):
    assert done.returncode == 0, done.output
    return {batches: row["loss"] for batches, row in done.reports("training").items()}


@pytest.mark.parametrize("trial", ["OwnLoader", "StreamOfHuggingFace", "Pipeline"])
def test_two_ranks_resume_bitwise(tmp_path, trial):
    if trial == "StreamOfHuggingFace":
        pytest.importorskip("datasets")
    whole = losses(run(tmp_path / "whole", trial, 8, 2))
    first = run(tmp_path / "parts", trial, 4, 2)
    assert losses(first).items() <= whole.items()
    assert losses(run(tmp_path / "parts", trial, 8, 2, run=first)) == whole


@pytest.mark.parametrize(("before", "after"), [(2, 1), (1, 2)])
def test_reread_on_other_ranks_trains_same_batches(tmp_path, before, after):
    whole = losses(run(tmp_path / "whole", "OwnLoader", 8, before))
    first = run(tmp_path / "parts", "OwnLoader", 3, before)
    refused = run(tmp_path / "parts", "OwnLoader", 8, after, run=first)
    assert refused.returncode != 0
    assert "set data.dstrial.resume_data: reread if the replicas take turns" in refused.output
    rewritten = run(
        tmp_path / "parts", "OwnLoader", 8, after, run=first, env={REWRITE_VARIABLE: str(LOCAL_ID)}
    )
    assert rewritten.returncode == 0, rewritten.output
    assert len(list(first.directory.checkpoints_path.glob("*/COMPLETE"))) == 2
    again = losses(run(tmp_path / "parts", "OwnLoader", 8, after, run=first, resume_data="reread"))
    assert again == pytest.approx(whole, rel=1e-5)


def test_restart_on_fewer_ranks_repeats_pass(tmp_path):
    first = run(tmp_path, "OwnLoader", 3, 2)
    again = run(tmp_path, "OwnLoader", 5, 1, run=first, resume_data="restart")
    assert again.returncode == 0, again.output
    assert "begins pass 0 again: 6 micro batches that were trained are trained once more" in again.output


def test_replicas_with_same_records_are_named(tmp_path):
    done = run(tmp_path, "SameRecordsOnAllRanks", 2, 2)
    assert "ranks 0 and 1 read the same records, but belong to replicas of their own" in done.output


def test_pipeline_stages_must_read_same_records(tmp_path):
    done = run(tmp_path / "good", "Pipeline", 3, 2)
    assert done.returncode == 0, done.output
    assert "read different records" not in done.output
    bad = run(tmp_path / "bad", "Pipeline", 3, 2, by_rank=True)
    assert "ranks 0 and 1 belong to one replica and read different records" in bad.output


def test_ragged_pipeline_micro_batch_is_refused(tmp_path):
    done = run(tmp_path, "Pipeline", 12, 2, ragged=True)
    assert done.returncode != 0
    assert "expected one shape, because the stages of a pipeline keep their buffers" in done.output
