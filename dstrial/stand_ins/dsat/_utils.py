"""``determined.pytorch.dsat._utils`` with dstrial's functions for scripts."""

from __future__ import annotations

from dstrial.dsat import dsat_reporting_context, get_ds_config_from_hparams, get_hf_args_with_overwrites
from dstrial.engine.deepspeed_internals.engines import dict_raise_error_on_duplicate_keys

__all__ = [
    "dict_raise_error_on_duplicate_keys",
    "dsat_reporting_context",
    "get_ds_config_from_hparams",
    "get_hf_args_with_overwrites",
]
