"""``determined.pytorch.dsat`` with dstrial's functions.

Determined removed this module in 0.38. Source of the names: ``harness/determined/pytorch/dsat/__init__.py`` 0.37.
"""

from __future__ import annotations

from dstrial import determined_imports
from dstrial.dsat import dsat_reporting_context, get_ds_config_from_hparams, get_hf_args_with_overwrites

__all__ = ["dsat_reporting_context", "get_ds_config_from_hparams", "get_hf_args_with_overwrites"]

determined_imports.announce(__name__)
