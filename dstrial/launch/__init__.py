"""Start ranks on this machine or a Determined cluster; report the first failure.

``python -m dstrial.launch`` and ``dstrial run`` both call ``run_ranks``. Names are resolved lazily, so that a rank does not
import the launcher.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dstrial.lazy_names import lazily

if TYPE_CHECKING:
    from dstrial.launch.failures import LaunchOutcome, RankFailure
    from dstrial.launch.local_ranks import Placement, run_ranks
    from dstrial.launch.rank_main import script_command, trial_command
    from dstrial.launch.slots import num_slots
    from dstrial.launch.trial_import import import_trial

_HOME = {
    "LaunchOutcome": "failures",
    "Placement": "local_ranks",
    "run_ranks": "local_ranks",
    "RankFailure": "failures",
    "script_command": "rank_main",
    "trial_command": "rank_main",
    "num_slots": "slots",
    "import_trial": "trial_import",
}

__all__ = [
    "LaunchOutcome",
    "Placement",
    "RankFailure",
    "import_trial",
    "num_slots",
    "run_ranks",
    "script_command",
    "trial_command",
]

__getattr__ = lazily(__name__, {name: f"{__name__}.{home}" for name, home in _HOME.items()})
