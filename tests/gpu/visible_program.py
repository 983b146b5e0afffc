"""Print the device memory that DeepSpeed reports after ``dstrial.init``."""

import dstrial

with dstrial.init(hparams={}, exp_conf={"name": "visible"}, enable_tensorboard_logging=False) as context:
    from deepspeed.accelerator import get_accelerator

    print(f"{context.device} has {int(get_accelerator().available_memory())} bytes", flush=True)
