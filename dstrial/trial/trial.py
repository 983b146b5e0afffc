"""DeepSpeedTrial: what a user subclasses. It decides nothing; the loop calls it."""

from __future__ import annotations

import abc
import pathlib
from collections.abc import Iterator
from typing import Any

import determined as det
import torch
from determined import pytorch

from dstrial.engine import state
from dstrial.errors import TrialContractError
from dstrial.trial.context import DeepSpeedTrialContext
from dstrial.trial.token_count import tokens_in


class _HarnessRefusal(det.TrialController):  # type: ignore[misc]  # determined ships no usable types for it
    """Tells a user of Determined's harness how to start a dstrial trial."""

    @classmethod
    def pre_execute_hook(cls, env: Any, distributed_backend: Any) -> None:  # noqa: ARG003  # Determined's hook
        raise TrialContractError(
            "entrypoint is a bare 'module:TrialClass', which runs Determined's own harness; expected a launcher "
            "for dstrial's trials. Set `entrypoint: python3 -m dstrial.launch --trial module:TrialClass`."
        )


class Checkpointable:
    """What is saved with a context's engines: a trial, or another library's objects."""

    _saves_engines_by_tag = False
    """Whether an overridden ``save`` writes every engine through DeepSpeed under ``_engine_tag`` all the same."""

    def save(self, context: DeepSpeedTrialContext, path: pathlib.Path) -> None:
        """Write all engines under ``path``, engine *i* as tag ``model<i>``. Ranks: all.

        Override it to save something else; then override ``load`` too.
        """
        for engine_idx, engine in enumerate(context.models):
            state.save_engine(engine, path, f"model{engine_idx}")

    def load(self, context: DeepSpeedTrialContext, load_path: pathlib.Path) -> None:
        """Read back what ``save`` wrote. Ranks: all.

        Raises:
            CheckpointError: an engine found nothing to load.
        """
        for engine_idx, engine in enumerate(context.models):
            state.load_engine(engine, load_path, f"model{engine_idx}")

    def _engine_tag(self, engine_idx: int) -> str:
        """Return the tag under which ``save`` writes an engine."""
        return f"model{engine_idx}"

    def _load_beside_engines(self, context: DeepSpeedTrialContext, load_path: pathlib.Path) -> None:
        """Read back what ``save`` wrote besides the (reshaped) engines."""


class DeepSpeedTrial(Checkpointable, det.LegacyTrial):  # type: ignore[misc]  # determined ships no usable types for it
    """A model, its data and its steps, for training with DeepSpeed.

    Subclass it. In ``__init__`` call ``deepspeed.initialize`` and pass every engine to
    ``context.wrap_model_engine``; build the loaders; write one training and one evaluation step. The loop
    does the rest: accumulation, epochs, metrics over all ranks, validation, checkpoints, stopping.

    Example::

        class MyTrial(DeepSpeedTrial):
            def __init__(self, context):
                self.context = context
                hparams = context.get_hparams()
                model = Net()
                engine, *_ = deepspeed.initialize(
                    model=model,
                    model_parameters=model.parameters(),
                    config=overwrite_deepspeed_config(
                        hparams["deepspeed_config"], hparams.get("overwrite_deepspeed_args", {})
                    ),
                )
                self.model_engine = context.wrap_model_engine(engine)

    Source: the contract of ``determined.pytorch.deepspeed.DeepSpeedTrial`` 0.38.1.
    """

    trial_controller_class = _HarnessRefusal
    trial_context_class = DeepSpeedTrialContext

    @abc.abstractmethod
    def __init__(self, context: DeepSpeedTrialContext) -> None:
        """Build the engines; ``context.wrap_model_engine`` takes each. Ranks: all."""

    @abc.abstractmethod
    def train_batch(
        self, dataloader_iter: Iterator[pytorch.TorchData] | None, epoch_idx: int, batch_idx: int
    ) -> torch.Tensor | dict[str, Any]:
        """Train on one micro batch, or on one whole batch.

        Data parallel: draw one micro batch, forward, ``backward``, ``step``; the loop calls this ``gradient_accumulation_steps``
        times per batch. Pipeline: ``self.model_engine.train_batch()``. Manual accumulation: all micro batches of the batch.

        Args:
            dataloader_iter: endless iterator over this replica's micro batches; None on ranks without a loader.
            epoch_idx: which epoch this batch belongs to, from 0, counted over the whole run.
            batch_idx: which batch (optimizer step) this is, from 0, counted over the whole run.

        Returns:
            Metric name -> value, or a bare loss, which is reported as ``loss``. Return tensors as they are:
            they stay on the device and are averaged over micro batches and replicas at the next report.

        Ranks: all. What ranks return that do not report metrics is ignored.
        """

    @abc.abstractmethod
    def build_training_data_loader(self) -> Any:
        """Return the training records as a ``DataLoader`` of micro batches.

        Its ``batch_size`` is ``context.get_train_micro_batch_size_per_gpu()``. Another kind of loader needs
        ``context.disable_dataset_reproducibility_checks()``. Ranks: those that read records.
        """

    @abc.abstractmethod
    def build_validation_data_loader(self) -> Any:
        """Return the validation records as a ``DataLoader``; None for no validation."""

    def build_callbacks(self) -> dict[str, pytorch.PyTorchCallback]:
        """Return callbacks by the name under which a checkpoint keeps each one's state."""
        return {}

    def evaluate_batch(
        self, dataloader_iter: Iterator[pytorch.TorchData] | None, batch_idx: int
    ) -> dict[str, Any]:
        """Evaluate one micro batch (in a pipeline: one round of them) without gradients.

        Args:
            dataloader_iter: iterator over this replica's validation micro batches; None on ranks without one.
            batch_idx: which call of this validation it is, from 0.

        Returns:
            Metric name -> mean over the records of this call. The loop weights calls by their records.

        Ranks: all.
        """
        raise NotImplementedError("override evaluate_batch or evaluate_full_dataset")

    def evaluate_full_dataset(self, data_loader: Any) -> dict[str, Any]:
        """Evaluate all validation records at once on the chief, not by ``evaluate_batch``.

        Args:
            data_loader: ``torch.utils.data.DataLoader`` over every validation record.

        Returns:
            Metric name -> value for the whole set.

        Ranks: the chief alone, so it cannot be used where a forward pass needs all ranks (ZeRO 3, pipelines).
        """
        raise NotImplementedError("override evaluate_batch or evaluate_full_dataset")

    def evaluation_reducer(self) -> pytorch.Reducer | dict[str, pytorch.Reducer]:
        """Return how metrics of ``evaluate_batch`` are combined, as one or by metric.

        One ``Reducer`` for all, or one per metric. ``AVG``, the default, is weighted by records.
        """
        return pytorch.Reducer.AVG

    def get_batch_length(self, batch: Any) -> int:
        """Return the records in one item of a loader; override it for your own batch type."""
        return int(pytorch.data_length(batch))

    def get_num_tokens(self, batch: Any) -> int | None:
        """Return the tokens in one item of the training loader.

        They are for tokens per second; None if they are unknown. By default the elements of ``input_ids`` where the item is a
        mapping that has it, padding included. Called for every micro batch before it is on the device, so it should be quick. Not
        in Determined.
        """
        return tokens_in(batch)
