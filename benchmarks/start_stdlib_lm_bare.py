"""The baseline of ``start.py`` for ``stdlib_lm``: the same pipeline in a plain DeepSpeed script, as torchrun starts it."""

from __future__ import annotations

import json
import os
import pathlib

import deepspeed
import start_marks
from corpus import VOCABULARY_SIZE, load_blocks
from deepspeed.pipe import PipelineModule
from deepspeed.utils import RepeatingLoader
from gpt import build_layers, next_character_loss
from torch.utils.data import DataLoader


def main() -> None:
    """Train as many batches as the trial does, and save once. Ranks: all, collectively."""
    hparams = json.loads(pathlib.Path("start_hyperparameters.json").read_text())
    deepspeed.init_distributed("gloo", auto_mpi_discovery=False)
    sizes = (hparams["block_size"], hparams["width"], hparams["num_layers"], hparams["num_heads"])
    model = PipelineModule(
        build_layers(VOCABULARY_SIZE, *sizes),
        num_stages=int(os.environ["WORLD_SIZE"]),
        loss_fn=next_character_loss,
        partition_method="type:Block",
    )
    engine, *_ = deepspeed.initialize(
        model=model,
        model_parameters=[parameter for parameter in model.parameters() if parameter.requires_grad],
        config=hparams["deepspeed_config"],
    )
    training, _ = load_blocks(
        hparams["num_chars_max"], hparams["block_size"], hparams["num_validation_blocks"]
    )
    loader = DataLoader(training, batch_size=engine.train_micro_batch_size_per_gpu(), shuffle=True)
    batches = iter(RepeatingLoader(loader))
    for _ in range(start_marks.NUM_BATCHES):
        start_marks.note_first_batch()
        engine.train_batch(batches)
    engine.save_checkpoint(str(pathlib.Path(os.environ["DSTRIAL_START_MARKS"]) / "checkpoint"))


if __name__ == "__main__":
    main()
