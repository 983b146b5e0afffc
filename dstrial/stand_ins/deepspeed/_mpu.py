"""``determined.pytorch.deepspeed._mpu`` with dstrial's functions."""

from __future__ import annotations

from dstrial import ModelParallelUnit, make_data_parallel_mpu, make_deepspeed_mpu

__all__ = ["ModelParallelUnit", "make_data_parallel_mpu", "make_deepspeed_mpu"]
