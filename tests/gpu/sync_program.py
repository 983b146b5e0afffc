"""Train in CUDA's sync debug mode "error", except from forward to optimizer step.

The mode covers the training loop, the data loader (pinned memory, 4 workers) and ``to_device``.
"""

import sys

REPORT_EVERY = 50


def main():
    import torch
    from small_runs import DEFINITIONS, deepspeed_config

    sys.path.insert(0, str(DEFINITIONS))
    import small_trials

    from dstrial import Batch, Trainer, init

    checked, copied = [], []

    class Checked(small_trials.DataParallelTrial):
        def train_batch(self, dataloader_iter, epoch_idx, batch_idx):
            is_checked = torch.cuda.get_sync_debug_mode() != 0
            records = next(dataloader_iter)
            assert all(tensor.is_pinned() for tensor in records), "the loader does not pin"
            features, targets = self.context.to_device(records)
            if is_checked:
                copied.append(batch_idx)
            torch.cuda.set_sync_debug_mode("default")
            assert features.device == targets.device == self.context.device
            loss = torch.nn.functional.mse_loss(self.model_engine(features), targets)
            self.model_engine.backward(loss)
            self.model_engine.step()
            if 5 <= batch_idx % REPORT_EVERY < 45:
                checked.append(batch_idx)
                torch.cuda.set_sync_debug_mode("error")
            return {"loss": loss}

    config = deepspeed_config(0, gradient_accumulation_steps=1)
    config["optimizer"] = {"type": "Adam", "params": {"lr": 0.01, "torch_adam": True}}
    hparams = {"deepspeed_config": config, "num_records": 4096, "num_workers": 4}
    exp_conf = {"name": "sync", "reproducibility": {"experiment_seed": 3}}
    with init(hparams=hparams, exp_conf=exp_conf) as context:
        assert context.device.type == "cuda", context.device
        Trainer(Checked(context), context).fit(max_length=Batch(50), reporting_period=Batch(50))
    torch.cuda.set_sync_debug_mode("default")
    print(f"{len(checked)} batches without a synchronisation, {len(copied)} copies of pinned records")


# The data loader's workers import this file.
if __name__ == "__main__":
    main()
