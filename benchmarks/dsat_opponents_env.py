"""Make the environment in which the benchmark's opponents run: ``determined==0.37.0``, Optuna, XGBoost.

Usage::

    python benchmarks/dsat_opponents_env.py DIR

The packages are installed by pip into a virtual environment of their own, so that the unmodified ``determined`` 0.37.0 is
the one that is imported there. Torch and DeepSpeed, which are large, are found where the running interpreter finds them.
"""

from __future__ import annotations

import importlib.util
import subprocess
import sys
import venv
from pathlib import Path

PACKAGES = ("determined==0.37.0", "optuna>=4,<6", "xgboost-cpu>=3,<4")
SHARED = ("torch", "deepspeed")


def main() -> None:
    """Make it, and print the interpreter to pass to ``dsat.py --opponents``."""
    if len(sys.argv) != 2:
        raise SystemExit(f"usage: python {Path(sys.argv[0]).name} DIR")
    directory = Path(sys.argv[1]).resolve()
    venv.create(directory, with_pip=True)
    python = directory / "bin" / "python"
    subprocess.run([python, "-m", "pip", "install", "--quiet", *PACKAGES], check=True)
    where = "import sysconfig; print(sysconfig.get_path('purelib'))"
    site = subprocess.run([python, "-c", where], check=True, capture_output=True, text=True).stdout.strip()
    shared = []
    for name in SHARED:
        found = importlib.util.find_spec(name)
        if found is None or found.origin is None:
            raise SystemExit(f"{name} is not installed here; expected it, for the opponents share it.")
        shared.append(str(Path(found.origin).parent.parent))
    # Searched after the environment's own packages.
    (Path(site) / "zz_shared.pth").write_text("\n".join(dict.fromkeys(shared)) + "\n", encoding="utf-8")
    print(python)


if __name__ == "__main__":
    main()
