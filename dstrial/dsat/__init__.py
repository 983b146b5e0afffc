"""dsat: tune the DeepSpeed configuration of an experiment.

The command is ``python3 -m dstrial.dsat METHOD CONFIG.yaml MODEL_DIR``. Scripts may import from this package the functions that
they import from ``determined.pytorch.dsat``. Each function is loaded at first use, so importing the package does not import
torch, deepspeed or transformers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dstrial.lazy_names import lazily

if TYPE_CHECKING:
    from dstrial.dsat.compat import get_ds_config_from_hparams
    from dstrial.dsat.rank.context import dsat_reporting_context
    from dstrial.integrations.huggingface.hf_args import get_hf_args_with_overwrites

__all__ = ["dsat_reporting_context", "get_ds_config_from_hparams", "get_hf_args_with_overwrites"]

_HOMES = {
    "dsat_reporting_context": "dstrial.dsat.rank.context",
    "get_ds_config_from_hparams": "dstrial.dsat.compat",
    "get_hf_args_with_overwrites": "dstrial.integrations.huggingface.hf_args",
}

__getattr__ = lazily(__name__, _HOMES)


def __dir__() -> list[str]:
    return sorted(set(globals()) | set(__all__))
