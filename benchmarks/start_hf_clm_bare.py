"""The baseline of ``start.py`` for ``hf_clm``: the same under Hugging Face's Trainer alone, as torchrun starts it."""

from __future__ import annotations

import json
import pathlib
from typing import Any

import start_marks
from corpus import load_blocks, read_modules, train_tokenizer
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    HfArgumentParser,
    Trainer,
    TrainingArguments,
    default_data_collator,
    set_seed,
)

VOCABULARY_SIZE = 1024


class StartTrainer(Trainer):
    """Hugging Face's Trainer; each rank notes when its first batch begins."""

    def training_step(self, *arguments: Any, **options: Any) -> Any:
        """Train as the Trainer does."""
        start_marks.note_first_batch()
        return super().training_step(*arguments, **options)


def main() -> None:
    """Train as many batches as the trial does, and save once. Ranks: all, collectively."""
    hparams = json.loads(pathlib.Path("start_hyperparameters.json").read_text())
    (args,) = HfArgumentParser(TrainingArguments).parse_args_into_dataclasses()
    set_seed(args.seed)
    texts = read_modules(hparams["num_chars_max"])
    tokenizer = train_tokenizer(texts, VOCABULARY_SIZE)
    training_set, _ = load_blocks(tokenizer, texts, hparams["block_size"], hparams["num_eval_blocks"])
    config = AutoConfig.for_model(
        "gpt2",
        vocab_size=len(tokenizer),
        n_positions=hparams["block_size"],
        n_layer=hparams["n_layer"],
        n_head=hparams["n_head"],
        n_embd=hparams["n_embd"],
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
    )
    StartTrainer(
        model=AutoModelForCausalLM.from_config(config),
        args=args,
        train_dataset=training_set,
        data_collator=default_data_collator,
        processing_class=tokenizer,
    ).train()


if __name__ == "__main__":
    main()
