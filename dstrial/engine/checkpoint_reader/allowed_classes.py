"""The classes that a checkpoint's files may hold, and why each is harmless.

torch's ``weights_only`` unpickler lets a file do three things with a class on the list: call it with any arguments, make an
instance without calling it, and give an instance any state (``torch/_weights_only_unpickler.py``: REDUCE, NEWOBJ, BUILD, torch
2.13). So a class is here only if all three are harmless; where one is not, a function or class of this module takes its place.
Instances may be given attributes that hide methods, but nothing that is reachable from the list runs code when it is called.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dstrial.engine.deepspeed_internals.optimizers import (
    DynamicLossScaler,
    LossScaler,
    ZeroStageEnum,
    fragment_address,
)


def _zero_stage(value: Any) -> ZeroStageEnum:
    """Return a ZeRO stage by its number."""
    return ZeroStageEnum(int(value))


class _CountsAsDict(type):
    """Makes a class equal to ``dict``, one of the few that torch fills (by ``==``)."""

    def __eq__(cls, other: object) -> bool:
        return other is dict or other is cls

    def __hash__(cls) -> int:
        return id(cls)


class _AttrDictAsData(dict[str, Any], metaclass=_CountsAsDict):
    """An ``AttrDict`` of a file, as the dictionary that it is."""

    def __setstate__(self, _state: object) -> None:
        """Leave out the state: a copy of the entries, and two settings of the class."""


LISTED: Mapping[str, Any] = {
    # Plain numbers in attributes; the constructor only stores its arguments, and there is neither __setstate__ nor a property
    # with a setter. ZeRO 1 and 2 and BF16_Optimizer save the object itself (stage_1_and_2.py:3551, stage3.py:3439).
    "deepspeed.runtime.fp16.loss_scaler.LossScaler": LossScaler,
    "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler": DynamicLossScaler,
    # Not the class: its members are this process's only ones, and a state would change them for everybody.
    "deepspeed.runtime.zero.config.ZeroStageEnum": _zero_stage,
    # A dataclass of two numbers, without __post_init__ (param_slice_mappings of ZeRO's and BF16_Optimizer's files).
    "deepspeed.utils.tensor_fragment.fragment_address": fragment_address,
    # In files of runs that gave DeepSpeed an AttrDict as its config. Not the class, whose __setstate__ sets attributes of any
    # name: the dictionary that it is. Its state names the type of its sequences, which is ``tuple``.
    "attrdict.dictionary.AttrDict": _AttrDictAsData,
    "builtins.tuple": tuple,
}
"""Name in a file -> what is used in its place. Never a module's prefix."""
