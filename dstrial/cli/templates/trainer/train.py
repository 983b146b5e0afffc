"""Train a tiny GPT-2 to count with Hugging Face's Trainer. Replace model and data."""

import sys

import torch
from transformers import GPT2Config, GPT2LMHeadModel, HfArgumentParser, Trainer, TrainingArguments

from dstrial import dsat
from dstrial.integrations import huggingface


class Counting(torch.utils.data.Dataset):
    """Sequences of 16 numbers, each one more than the one before, modulo 50."""

    def __init__(self, first: int, number: int) -> None:
        self.records = [(torch.arange(16) + first + index) % 50 for index in range(number)]

    def __len__(self) -> int:
        return len(self.records)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.records[index], "labels": self.records[index]}


def main() -> None:
    with huggingface.init() as core_context:
        hparams = huggingface.hyperparameters(core_context)
        arguments = dsat.get_hf_args_with_overwrites(sys.argv[1:], hparams)
        (args,) = HfArgumentParser(TrainingArguments).parse_args_into_dataclasses(arguments)
        callback = huggingface.DetCallback(core_context, args)
        width = hparams["width"]
        sizes = {"vocab_size": 50, "n_positions": 16, "n_layer": 2, "n_head": 2, "n_embd": width}
        model = GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=0, eos_token_id=0))
        trainer = Trainer(
            model=model,
            args=args,
            train_dataset=Counting(0, 512),
            eval_dataset=Counting(17, 64),
            callbacks=[callback],
        )
        huggingface.train(trainer, callback)  # resumes by itself, on any number of slots


if __name__ == "__main__":
    main()
