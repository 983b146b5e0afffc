"""A small GPT-2 over the text of Python's standard library: a script of Hugging Face's Trainer, which dsat tunes."""

import sys

import torch
from transformers import GPT2Config, GPT2LMHeadModel, HfArgumentParser, Trainer, TrainingArguments
from words import WORDS, load_blocks

from dstrial import dsat
from dstrial.integrations import huggingface


def main() -> None:
    with huggingface.init() as core_context:
        hparams = huggingface.hyperparameters(core_context)
        arguments = dsat.get_hf_args_with_overwrites(sys.argv[1:], hparams)
        (args,) = HfArgumentParser(TrainingArguments).parse_args_into_dataclasses(arguments)
        torch.manual_seed(args.seed)
        config = GPT2Config(vocab_size=WORDS, n_positions=64, n_layer=2, n_head=2, n_embd=64)
        det_callback = huggingface.DetCallback(core_context, args)
        trainer = Trainer(
            model=GPT2LMHeadModel(config),
            args=args,
            train_dataset=load_blocks(64),
            callbacks=[det_callback],
        )
        with dsat.dsat_reporting_context(core_context, det_callback.current_op):
            trainer.train()


if __name__ == "__main__":
    main()
