"""Trials that train only LoRA adapters or the last layer of a small Llama model."""

from __future__ import annotations

from typing import Any

import deepspeed
import torch
import transformers

from dstrial import DataLoader, DeepSpeedTrial

VOCABULARY = 32


def base_model(seed: int = 5, *, is_tied: bool = False) -> Any:
    torch.manual_seed(seed)
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=16,
        tie_word_embeddings=is_tied,
    )
    return transformers.LlamaForCausalLM(config)


def lora_model(seed: int = 5, *, is_tied: bool = False, **options: Any) -> Any:
    import peft

    given = {"target_modules": ["q_proj", "v_proj"], "lora_dropout": 0.1, **options}
    config = peft.LoraConfig(r=2, lora_alpha=4, task_type="CAUSAL_LM", **given)
    return peft.get_peft_model(base_model(seed, is_tied=is_tied), config)


def model_with_frozen_parts(seed: int = 5) -> Any:
    model = base_model(seed)
    for name, parameter in model.named_parameters():
        parameter.requires_grad = "layers.1" in name
    return model


class Sentences(torch.utils.data.Dataset):
    def __init__(self, num_records: int, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.tokens = torch.randint(VOCABULARY, (num_records, 8), generator=generator)

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, idx: int) -> torch.Tensor:
        return self.tokens[idx]


class LoraTrial(DeepSpeedTrial):
    def __init__(self, context: Any) -> None:
        self.context = context
        self.engine = context.wrap_model_engine(self.build_engine())

    def model(self) -> Any:
        return lora_model(self.context.get_hparams().get("seed", 5))

    def parameters(self, model: Any) -> list[Any]:
        return [one for one in model.parameters() if one.requires_grad]

    def build_engine(self) -> Any:
        config = self.context.get_hparams()["deepspeed_config"]
        model = self.model()
        engine, *_ = deepspeed.initialize(model=model, model_parameters=self.parameters(model), config=config)
        return engine

    def build_training_data_loader(self) -> DataLoader:
        return DataLoader(
            Sentences(64, 1), batch_size=self.context.get_train_micro_batch_size_per_gpu(), shuffle=True
        )

    def build_validation_data_loader(self) -> DataLoader:
        return DataLoader(Sentences(16, 2), batch_size=self.context.get_train_micro_batch_size_per_gpu())

    def train_batch(self, dataloader_iter: Any, epoch_idx: int, batch_idx: int) -> dict[str, Any]:
        tokens = self.context.to_device(next(dataloader_iter))
        loss = self.engine(input_ids=tokens, labels=tokens).loss
        self.engine.backward(loss)
        self.engine.step()
        return {"loss": loss}

    def evaluate_batch(self, dataloader_iter: Any, batch_idx: int) -> dict[str, Any]:
        tokens = self.context.to_device(next(dataloader_iter))
        return {"validation_loss": self.engine(input_ids=tokens, labels=tokens).loss}


class FrozenTrial(LoraTrial):
    """Trains the last layer and gives the optimizer only its parameters."""

    def model(self) -> Any:
        return model_with_frozen_parts()


class FrozenInOptimizerTrial(FrozenTrial):
    """Trains the last layer, but gives the optimizer all parameters."""

    def parameters(self, model: Any) -> list[Any]:
        return list(model.parameters())
