"""``python3 -m determined.pytorch.dsat METHOD CONFIG.yaml MODEL_DIR`` of dstrial."""

from __future__ import annotations

import sys

from dstrial.dsat.__main__ import main

if __name__ == "__main__":
    sys.exit(main())
