"""Fine-tune a language model with LoRA: only adapters and the output layer are trained and saved."""

import math

import deepspeed
import peft
import torch
from corpus import VOCABULARY_SIZE, load_blocks
from transformers import GPT2Config, GPT2LMHeadModel

from dstrial import DataLoader, DeepSpeedTrial, DeepSpeedTrialContext, overwrite_deepspeed_config


def build_base_model(hparams: dict) -> GPT2LMHeadModel:
    """Build the base model; for pretrained weights, call ``AutoModelForCausalLM.from_pretrained`` here.

    Checkpoints do not have the base model's weights, so each start must build equal weights. dstrial checks this at a resume.
    """
    with torch.random.fork_rng():
        torch.manual_seed(hparams["base_seed"])
        return GPT2LMHeadModel(
            GPT2Config(
                vocab_size=VOCABULARY_SIZE,
                n_positions=hparams["block_size"],
                n_embd=hparams["width"],
                n_layer=hparams["num_layers"],
                n_head=hparams["num_heads"],
                tie_word_embeddings=False,
                bos_token_id=None,
                eos_token_id=None,
                # Dropout draws from each rank's own random state, and would differ with the number of ranks.
                resid_pdrop=0.0,
                embd_pdrop=0.0,
                attn_pdrop=0.0,
            )
        )


class LoraClmTrial(DeepSpeedTrial):
    """Trains the adapters; reports ``loss`` (nats per character), ``validation_loss`` and ``bits_per_char``."""

    def __init__(self, context: DeepSpeedTrialContext) -> None:
        self.context = context
        hparams = context.get_hparams()
        lora = peft.LoraConfig(
            task_type="CAUSAL_LM",
            r=hparams["rank"],
            lora_alpha=2 * hparams["rank"],
            target_modules=["c_attn", "c_fc"],
            modules_to_save=[
                "lm_head"
            ],  # the base model has random weights: its output layer is trained whole
            fan_in_fan_out=True,  # GPT-2's layers hold their weights transposed
        )
        model = peft.get_peft_model(build_base_model(hparams), lora)
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
            self.training_set, batch_size=self.context.get_train_micro_batch_size_per_gpu(), shuffle=True
        )

    def build_validation_data_loader(self) -> DataLoader:
        return DataLoader(self.validation_set, batch_size=self.context.get_train_micro_batch_size_per_gpu())

    def _loss(self, dataloader_iter):
        (characters,) = self.context.to_device(next(dataloader_iter))
        return self.model_engine(input_ids=characters, labels=characters).loss

    def train_batch(self, dataloader_iter, epoch_idx, batch_idx):
        loss = self._loss(dataloader_iter)
        self.model_engine.backward(loss)
        self.model_engine.step()
        return {"loss": loss}

    def evaluate_batch(self, dataloader_iter, batch_idx):
        loss = self._loss(dataloader_iter)
        return {"validation_loss": loss, "bits_per_char": loss / math.log(2)}
