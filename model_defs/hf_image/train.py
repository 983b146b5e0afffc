"""Train a small vision transformer on scikit-learn's digits with Hugging Face's Trainer, as a trial."""

import dataclasses
import sys

import numpy as np
import torch
from sklearn.datasets import load_digits
from torch.utils.data import Dataset
from transformers import (
    EvalPrediction,
    HfArgumentParser,
    Trainer,
    TrainingArguments,
    ViTConfig,
    ViTForImageClassification,
    set_seed,
)

from dstrial import dsat
from dstrial.integrations import huggingface

NUM_CLASSES = 10
NUM_EVAL_RECORDS = 360  # of 1,797


@dataclasses.dataclass
class ModelArguments:
    """Arguments of this script besides ``TrainingArguments``; the config's ``hyperparameters`` override them."""

    hidden_size: int = 48
    num_layers: int = 3
    num_heads: int = 4
    patch_size: int = 2
    split_seed: int = 1797


class Digits(Dataset):
    """Images (1, 8, 8) in -1..1 and labels, as inputs of the vision transformer."""

    def __init__(self, images: torch.Tensor, labels: torch.Tensor) -> None:
        self.images, self.labels = images, labels

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, record_idx: int) -> dict[str, torch.Tensor]:
        return {"pixel_values": self.images[record_idx], "labels": self.labels[record_idx]}


def load_splits(split_seed: int) -> tuple[Digits, Digits]:
    """Return the training and evaluation sets; trials with equal ``split_seed`` are evaluated on the same images."""
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 8.0 - 1.0
    labels = torch.tensor(digits.target, dtype=torch.long)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(split_seed))
    evaluation, training = order[:NUM_EVAL_RECORDS], order[NUM_EVAL_RECORDS:]
    return Digits(images[training], labels[training]), Digits(images[evaluation], labels[evaluation])


def accuracy(prediction: EvalPrediction) -> dict[str, float]:
    return {"accuracy": float(np.mean(prediction.predictions.argmax(axis=-1) == prediction.label_ids))}


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
        training_set, evaluation_set = load_splits(model_args.split_seed)
        config = ViTConfig(
            image_size=8,
            num_channels=1,
            patch_size=model_args.patch_size,
            hidden_size=model_args.hidden_size,
            intermediate_size=2 * model_args.hidden_size,
            num_hidden_layers=model_args.num_layers,
            num_attention_heads=model_args.num_heads,
            # Dropout draws from each rank's own random state, and would differ with the number of ranks.
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
            num_labels=NUM_CLASSES,
        )
        trainer = Trainer(
            model=ViTForImageClassification(config),
            args=args,
            train_dataset=training_set,
            eval_dataset=evaluation_set,
            compute_metrics=accuracy,
            callbacks=[callback],
        )
        huggingface.train(trainer, callback)


if __name__ == "__main__":
    main()
