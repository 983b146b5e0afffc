"""Run by themselves the tests that failed in the last run of pytest, and end with their status.

    python tools/run_failed_tests.py [OPTION OF PYTEST...]

A run that could not begin, and one in which many failed, is not one that a busy machine has disturbed: nothing is run again then.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

# Of pytest, https://docs.pytest.org/en/stable/how-to/cache.html. `--last-failed` would run all tests if none of these is found.
FAILED = Path(".pytest_cache/v/cache/lastfailed")
MANY = 20


def main() -> None:
    """Become a pytest of those tests."""
    failed = list(json.loads(FAILED.read_text(encoding="utf-8"))) if FAILED.exists() else []
    if not failed:
        sys.exit("no test has failed, the run itself has: nothing is run again")
    if uncollected := [each for each in failed if "::" not in each]:
        sys.exit(f"not collected, and not run again: {', '.join(uncollected)}")
    if len(failed) > MANY:
        sys.exit(f"{len(failed)} tests have failed, more than {MANY}: none is run again")
    os.execv(sys.executable, [sys.executable, "-m", "pytest", *sys.argv[1:], *failed])  # noqa: S606  # no shell is meant


if __name__ == "__main__":
    main()
