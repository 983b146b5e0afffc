"""Run the ``dstrial`` command as ``python -m dstrial``."""

import sys

from dstrial.cli.app import main

if __name__ == "__main__":
    sys.exit(main())
