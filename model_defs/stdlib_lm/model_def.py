"""A character-level GPT over Python's standard library: a DeepSpeed pipeline of two stages."""

import math
import warnings

import deepspeed
from corpus import VOCABULARY_SIZE, load_blocks
from deepspeed.pipe import PipelineModule
from gpt import build_layers, next_character_loss

from dstrial import DataLoader, DeepSpeedTrial, DeepSpeedTrialContext, overwrite_deepspeed_config

# DeepSpeed copies tied weights between stages while it builds the model; torch warns of it in backward.
warnings.filterwarnings("ignore", message="c10d::broadcast_")


class StdlibLmTrial(DeepSpeedTrial):
    """Trains the GPT; reports ``loss`` (nats per character), ``validation_loss`` and ``bits_per_char``."""

    def __init__(self, context: DeepSpeedTrialContext) -> None:
        self.context = context
        hparams = context.get_hparams()
        model = PipelineModule(
            build_layers(
                VOCABULARY_SIZE,
                hparams["block_size"],
                hparams["width"],
                hparams["num_layers"],
                hparams["num_heads"],
            ),
            num_stages=hparams["num_stages"],
            loss_fn=next_character_loss,
            partition_method="type:Block",  # the same number of transformer blocks on every stage
        )
        engine, _, _, _ = deepspeed.initialize(
            model=model,
            model_parameters=[parameter for parameter in model.parameters() if parameter.requires_grad],
            config=overwrite_deepspeed_config(
                hparams["deepspeed_config"], hparams.get("overwrite_deepspeed_args", {})
            ),
        )
        self.model_engine = context.wrap_model_engine(engine)
        self.training_set, self.validation_set = load_blocks(
            hparams["num_chars_max"], hparams["block_size"], hparams["num_validation_blocks"]
        )

    def build_training_data_loader(self) -> DataLoader:
        return DataLoader(
            self.training_set,
            batch_size=self.context.get_train_micro_batch_size_per_gpu(),
            shuffle=True,
        )

    def build_validation_data_loader(self) -> DataLoader:
        return DataLoader(self.validation_set, batch_size=self.context.get_train_micro_batch_size_per_gpu())

    def train_batch(self, dataloader_iter, epoch_idx, batch_idx):
        return {"loss": self.model_engine.train_batch()}

    def evaluate_batch(self, dataloader_iter, batch_idx):
        loss = self.model_engine.eval_batch()
        return {"validation_loss": loss, "bits_per_char": loss / math.log(2)}
