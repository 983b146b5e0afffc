"""A small GPT-2 over the text of Python's standard library: a plain script of Hugging Face's Trainer."""

import sys

import torch
from transformers import GPT2Config, GPT2LMHeadModel, HfArgumentParser, Trainer, TrainingArguments
from words import WORDS, load_blocks


def main() -> None:
    arguments = sys.argv[1:]
    (args,) = HfArgumentParser(TrainingArguments).parse_args_into_dataclasses(arguments)
    torch.manual_seed(args.seed)
    config = GPT2Config(vocab_size=WORDS, n_positions=64, n_layer=2, n_head=2, n_embd=64)
    trainer = Trainer(
        model=GPT2LMHeadModel(config),
        args=args,
        train_dataset=load_blocks(64),
    )
    trainer.train()


if __name__ == "__main__":
    main()
