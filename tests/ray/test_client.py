"""What asks the bridge says so where Ray is not installed."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from dstrial.errors import MissingExtraError
from dstrial.ray.client import require_ray


def test_an_environment_without_ray_is_told_what_to_install(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    # A directory of that name is no package.
    (tmp_path / "ray").mkdir()
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    monkeypatch.delitem(sys.modules, "ray", raising=False)
    with pytest.raises(
        MissingExtraError, match=r"backend: ray needs Ray.*pip install 'DSTRIAL_CHECKOUT_OR_WHEEL\[ray\]'"
    ):
        require_ray("backend: ray")
