"""Run a transformers ``Trainer`` as a trial: report, checkpoint, stop and resume.

::

    with huggingface.init() as core_context:
        hparams = huggingface.hyperparameters(core_context)
        arguments = dsat.get_hf_args_with_overwrites(sys.argv[1:], hparams)
        (args,) = HfArgumentParser(TrainingArguments).parse_args_into_dataclasses(arguments)
        callback = huggingface.DetCallback(core_context, args)
        trainer = Trainer(model=model, args=args, callbacks=[callback], ...)
        huggingface.train(trainer, callback)

Names are resolved at first use: importing this package imports neither torch nor transformers.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from dstrial.integrations import require
from dstrial.lazy_names import lazily

if TYPE_CHECKING:
    from dstrial.integrations.huggingface.callback import DetCallback
    from dstrial.integrations.huggingface.training import train
    from dstrial.integrations.huggingface.trial import hyperparameters, init

__all__ = ["DetCallback", "train", "init", "hyperparameters"]

_HOMES = {
    "DetCallback": "callback",
    "hyperparameters": "trial",
    "init": "trial",
    "train": "training",
}


_resolve = lazily(__name__, {name: f"{__name__}.{home}" for name, home in _HOMES.items()})


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    require("transformers", "accelerate", extra="huggingface", who=__name__)
    # DeepSpeed chooses its accelerator at its first import, so the choice must be prepared before.
    importlib.import_module("dstrial.ranks.process_group").prepare_accelerator()
    return _resolve(name)


def __dir__() -> list[str]:
    return sorted(set(globals()) | set(__all__))
