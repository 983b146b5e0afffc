"""A plain Accelerate loop as a trial: a small GPT-2 over the source of Python's standard library."""

import torch
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration
from text import read_source, token_blocks
from torch.utils.data import DataLoader
from transformers import GPT2Config, GPT2LMHeadModel

from dstrial.integrations.accelerate import Reporter


@torch.no_grad()
def validate(accelerator: Accelerator, model: torch.nn.Module, loader: DataLoader) -> dict[str, torch.Tensor]:
    """Return the mean loss over all validation blocks, the same on every rank."""
    model.eval()
    losses = []
    for blocks in loader:
        loss = model(input_ids=blocks, labels=blocks).loss
        losses.append(accelerator.gather_for_metrics(loss.repeat(len(blocks))))
    model.train()
    return {"validation_loss": torch.cat(losses).mean()}


def main() -> None:
    accelerator = Accelerator(
        # A resume can repeat the order of this sampler. The scheduler makes one step per batch, not per process.
        dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True, data_seed=20),
        step_scheduler_with_optimizer=False,
    )
    with Reporter(accelerator) as reporter:
        hparams = reporter.hparams
        blocks = token_blocks(
            read_source(hparams["num_chars_max"]), hparams["vocab_size"], hparams["block_size"]
        )
        is_validation = torch.arange(len(blocks)) % hparams["validate_every"] == 0
        micro_batch_size = reporter.micro_batch_size(8)
        loader = DataLoader(blocks[~is_validation], batch_size=micro_batch_size, shuffle=True, drop_last=True)
        validation_loader = DataLoader(blocks[is_validation], batch_size=micro_batch_size)
        config = GPT2Config(
            vocab_size=hparams["vocab_size"],
            n_positions=hparams["block_size"],
            n_layer=hparams["num_layers"],
            n_head=hparams["num_heads"],
            n_embd=hparams["width"],
            bos_token_id=None,
            eos_token_id=None,
            # Dropout draws from each rank's own random state, and would differ with the number of ranks.
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
        )
        model = GPT2LMHeadModel(config)
        optimizer = torch.optim.AdamW(model.parameters(), lr=hparams["learning_rate"])
        num_warmup = hparams["num_warmup_batches"]
        scheduler = torch.optim.lr_scheduler.LambdaLR(
            optimizer, lambda batch: min(1.0, (batch + 1) / num_warmup)
        )
        model, optimizer, loader, validation_loader, scheduler = accelerator.prepare(
            model, optimizer, loader, validation_loader, scheduler
        )
        reporter.resume()
        for batch in reporter.batches(loader):
            with accelerator.accumulate(model):
                loss = model(input_ids=batch, labels=batch).loss
                accelerator.backward(loss)
                optimizer.step()
                if accelerator.sync_gradients:
                    scheduler.step()
                optimizer.zero_grad()
            reporter.step({"loss": loss})
            if reporter.should_validate:
                reporter.report_validation(validate(accelerator, model, validation_loader))


if __name__ == "__main__":
    main()
