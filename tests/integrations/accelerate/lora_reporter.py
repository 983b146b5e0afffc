"""An Accelerate script that trains a PEFT LoRA adapter on a small model."""

import peft
import torch
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration
from transformers import GPT2Config, GPT2LMHeadModel

from dstrial.integrations.accelerate import Reporter


def main() -> None:
    accelerator = Accelerator(
        dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True, data_seed=3)
    )
    with Reporter(accelerator) as reporter:
        torch.manual_seed(reporter.hparams.get("base_seed", 1))
        config = GPT2Config(
            vocab_size=32,
            n_positions=8,
            n_layer=2,
            n_head=2,
            n_embd=16,
            resid_pdrop=0,
            embd_pdrop=0,
            attn_pdrop=0,
        )
        lora = peft.LoraConfig(r=2, target_modules=["c_attn"], task_type="CAUSAL_LM")
        model = peft.get_peft_model(GPT2LMHeadModel(config), lora)
        optimizer = torch.optim.AdamW([one for one in model.parameters() if one.requires_grad], lr=0.01)
        generator = torch.Generator().manual_seed(7)
        data = torch.utils.data.TensorDataset(torch.randint(0, 32, (48, 8), generator=generator))
        loader = torch.utils.data.DataLoader(data, batch_size=reporter.micro_batch_size(4), shuffle=True)
        model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
        reporter.resume()
        for (tokens,) in reporter.batches(loader):
            with accelerator.accumulate(model):
                loss = model(input_ids=tokens, labels=tokens).loss
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
            reporter.step({"loss": loss})
            if reporter.should_validate:
                reporter.report_validation({"validation_loss": loss})


if __name__ == "__main__":
    main()
