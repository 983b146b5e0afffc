"""``DeepSpeedTrial``, the base class of user trials."""

from __future__ import annotations

import abc
import pathlib
from collections.abc import Iterator, Mapping
from typing import Any

import determined as det
import torch
from determined import pytorch

from dstrial.engine import state
from dstrial.errors import TrialContractError
from dstrial.trial.context import DeepSpeedTrialContext


def tokens_in(micro_batch: Any) -> int | None:
    """Return the number of elements of ``input_ids`` in a micro batch, with padding.

    Returns None if the micro batch, or the first item of a tuple or list, is no mapping with this key.
    """
    if isinstance(micro_batch, (tuple, list)) and micro_batch and isinstance(micro_batch[0], Mapping):
        micro_batch = micro_batch[0]
    if not isinstance(micro_batch, Mapping):
        return None
    ids = micro_batch.get("input_ids")
    return ids.numel() if isinstance(ids, torch.Tensor) else None


class _HarnessRefusal(det.TrialController):  # type: ignore[misc]  # determined ships no usable types for it
    """Trial controller with which Determined's harness fails at the start.

    The error message names the right entrypoint.
    """

    @classmethod
    def pre_execute_hook(cls, env: Any, distributed_backend: Any) -> None:  # noqa: ARG003  # Determined's hook
        raise TrialContractError(
            "entrypoint is a bare 'module:TrialClass', which runs Determined's own harness; expected a launcher "
            "for dstrial's trials. Set `entrypoint: python3 -m dstrial.launch --trial module:TrialClass`."
        )


class Checkpointable:
    """Saves and loads all engines of a context; base class of trials."""

    _saves_engines_by_tag = False
    """Set to True by a subclass that overrides ``save`` and still saves engine *i* under the tag ``_engine_tag(i)``."""

    def save(self, context: DeepSpeedTrialContext, path: pathlib.Path) -> None:
        """Write all engines below ``path``, engine *i* with DeepSpeed's tag ``model<i>``.

        To save more state, override ``save`` and ``load``. Ranks: all, collectively.
        """
        for engine_idx, engine in enumerate(context.models):
            state.save_engine(engine, path, self._engine_tag(engine_idx))

    def load(self, context: DeepSpeedTrialContext, load_path: pathlib.Path) -> None:
        """Load the files that ``save`` wrote. Ranks: all, collectively.

        Raises:
            CheckpointError: an engine has no files to load.
        """
        for engine_idx, engine in enumerate(context.models):
            state.load_engine(engine, load_path, self._engine_tag(engine_idx))

    def _engine_tag(self, engine_idx: int) -> str:
        """Return DeepSpeed's tag (a folder in the checkpoint) for an engine's files."""
        return f"model{engine_idx}"

    def _load_beside_engines(self, context: DeepSpeedTrialContext, load_path: pathlib.Path) -> None:
        """Load the additional state that a subclass's ``save`` wrote.

        Called instead of ``load`` if the engines' state is resharded, because dstrial then loads the engines. A no-op by
        default.
        """


class DeepSpeedTrial(Checkpointable, det.LegacyTrial):  # type: ignore[misc]  # determined ships no usable types for it
    """Base class of a trial: model, loaders, training and evaluation steps.

    In the subclass's ``__init__`` call ``deepspeed.initialize`` and pass every engine to
    ``context.wrap_model_engine``. Define the loaders, a training step and an evaluation step. The loop handles
    accumulation, epochs, metrics over all ranks, validation, checkpoints and stopping.

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
        """Create the engines; pass each to ``context.wrap_model_engine``.

        Ranks: all, collectively.
        """

    @abc.abstractmethod
    def train_batch(
        self, dataloader_iter: Iterator[pytorch.TorchData] | None, epoch_idx: int, batch_idx: int
    ) -> torch.Tensor | dict[str, Any]:
        """Train on one micro batch, or on one whole batch.

        Without a pipeline: read one micro batch, call forward, ``backward`` and ``step``. This method is called
        ``gradient_accumulation_steps`` times per batch. In a pipeline: call ``self.model_engine.train_batch()``. After
        ``disable_auto_grad_accumulation()``: train all micro batches of the batch in one call.

        Args:
            dataloader_iter: endless iterator over this replica's micro batches; None on ranks without a loader.
            epoch_idx: epoch of this batch, from 0, counted over the whole run.
            batch_idx: index of this batch (optimizer step), from 0, counted over the whole run.

        Returns:
            Metric name -> value, or only a loss tensor, which is reported as ``loss``. Do not convert tensors: they
            stay on the device and are averaged over micro batches and replicas at the next report.

        Ranks: all, collectively. Results of ranks that do not report metrics are ignored.
        """

    @abc.abstractmethod
    def build_training_data_loader(self) -> Any:
        """Return the training records as a ``dstrial.DataLoader`` of micro batches.

        The loader's ``batch_size`` must be ``context.get_train_micro_batch_size_per_gpu()``. To return another class of loader,
        first call ``context.disable_dataset_reproducibility_checks()``. Ranks: only those that read records.
        """

    @abc.abstractmethod
    def build_validation_data_loader(self) -> Any:
        """Return the validation records as a ``dstrial.DataLoader``, or None."""

    def build_callbacks(self) -> dict[str, pytorch.PyTorchCallback]:
        """Return name -> callback; checkpoints store each callback's state by name."""
        return {}

    def evaluate_batch(
        self, dataloader_iter: Iterator[pytorch.TorchData] | None, batch_idx: int
    ) -> dict[str, Any]:
        """Evaluate one micro batch (in a pipeline several) without gradients.

        Args:
            dataloader_iter: iterator over this replica's validation micro batches; None on ranks without a loader.
            batch_idx: index of this call in the validation, from 0.

        Returns:
            Metric name -> mean over the records of this call. Calls are weighted by their number of records.

        Ranks: all, collectively.
        """
        raise NotImplementedError("override evaluate_batch or evaluate_full_dataset")

    def evaluate_full_dataset(self, data_loader: Any) -> dict[str, Any]:
        """Evaluate all validation records at once on rank 0.

        Args:
            data_loader: ``torch.utils.data.DataLoader`` over every validation record.

        Returns:
            Metric name -> value for the whole set.

        Ranks: rank 0 only. The method cannot be used if a forward pass needs all ranks (ZeRO 3, pipelines).
        """
        raise NotImplementedError("override evaluate_batch or evaluate_full_dataset")

    def evaluation_reducer(self) -> pytorch.Reducer | dict[str, pytorch.Reducer]:
        """Return how to combine the results of ``evaluate_batch`` over calls and ranks.

        A dict maps each metric name to a ``Reducer``. The default ``AVG`` is weighted by records.
        """
        return pytorch.Reducer.AVG

    def get_batch_length(self, batch: Any) -> int:
        """Return the number of records in a loader's item; override it for your own types."""
        return int(pytorch.data_length(batch))

    def get_num_tokens(self, batch: Any) -> int | None:
        """Return the number of tokens in one item of the training loader; None if unknown.

        Used to report tokens per second. By default, the number of elements of ``input_ids``, with padding, if the item is a
        mapping with this key. Called for every micro batch, so it should be fast. Not in Determined.
        """
        return tokens_in(batch)
