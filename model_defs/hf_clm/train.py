"""Train a causal language model of GPT-2's architecture from scratch with Hugging Face's Trainer, as a trial."""

import dataclasses
import sys

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

from dstrial import dsat
from dstrial.integrations import huggingface


@dataclasses.dataclass
class ModelArguments:
    """Arguments of this script besides ``TrainingArguments``; the config's ``hyperparameters`` override them."""

    vocab_size: int = 1024
    n_layer: int = 4
    n_head: int = 4
    n_embd: int = 128
    block_size: int = 128
    num_chars_max: int = 2_000_000
    num_eval_blocks: int = 200


def main() -> None:
    with huggingface.init() as core_context:
        hparams = huggingface.hyperparameters(core_context)
        arguments = dsat.get_hf_args_with_overwrites(sys.argv[1:], hparams)
        model_args, args = HfArgumentParser((ModelArguments, TrainingArguments)).parse_args_into_dataclasses(
            arguments
        )
        model_args = dataclasses.replace(
            model_args, **{name: hparams[name] for name in vars(model_args) if name in hparams}
        )
        callback = huggingface.DetCallback(core_context, args)
        set_seed(args.seed)
        texts = read_modules(model_args.num_chars_max)
        tokenizer = train_tokenizer(texts, model_args.vocab_size)
        training_set, evaluation_set = load_blocks(
            tokenizer, texts, model_args.block_size, model_args.num_eval_blocks
        )
        config = AutoConfig.for_model(
            "gpt2",
            vocab_size=len(tokenizer),
            n_positions=model_args.block_size,
            n_layer=model_args.n_layer,
            n_head=model_args.n_head,
            n_embd=model_args.n_embd,
            bos_token_id=tokenizer.bos_token_id,
            eos_token_id=tokenizer.eos_token_id,
            # Dropout draws from each rank's own random state, and would differ with the number of ranks.
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
        )
        trainer = Trainer(
            model=AutoModelForCausalLM.from_config(config),
            args=args,
            train_dataset=training_set,
            eval_dataset=evaluation_set,
            data_collator=default_data_collator,
            processing_class=tokenizer,
            callbacks=[callback],
        )
        huggingface.train(trainer, callback)


if __name__ == "__main__":
    main()
