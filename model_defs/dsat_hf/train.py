"""Train a small GPT-2 on the source of Python's standard library: a script with Hugging Face's Trainer that dsat tunes."""

import sys
from collections.abc import Sequence

import torch
from transformers import GPT2Config, GPT2LMHeadModel, HfArgumentParser, Trainer, TrainingArguments
from words import WORDS, load_splits

from dstrial import dsat
from dstrial.integrations import huggingface


def build_trainer(arguments: Sequence[str]) -> Trainer:
    (args,) = HfArgumentParser(TrainingArguments).parse_args_into_dataclasses(arguments)
    torch.manual_seed(args.seed)
    config = GPT2Config(
        vocab_size=WORDS, n_positions=64, n_layer=2, n_head=2, n_embd=64, bos_token_id=0, eos_token_id=0
    )
    training_set, validation_set = load_splits(64)
    model = GPT2LMHeadModel(config)
    return Trainer(model=model, args=args, train_dataset=training_set, eval_dataset=validation_set)


def main() -> None:
    with huggingface.init() as core_context:
        hparams = huggingface.hyperparameters(core_context)
        arguments = dsat.get_hf_args_with_overwrites(sys.argv[1:], hparams)
        trainer = build_trainer(arguments)
        det_callback = huggingface.DetCallback(core_context, trainer.args)
        trainer.add_callback(det_callback)
        with dsat.dsat_reporting_context(core_context, det_callback.current_op):
            trainer.train()


if __name__ == "__main__":
    main()
