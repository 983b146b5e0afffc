"""Which jobs wait for nodes that are down or drained, by what sinfo of Slurm 22.05 prints."""

from __future__ import annotations

import pytest

from dstrial.slurm.node_resources import missing_nodes, parse_node_resources

_NODES = """host1|low*|idle|4|4000|(null)
host1|high|idle|4|4000|(null)
host2|low*|mixed|4|4000|gpu:2
host2|high|mixed|4|4000|gpu:2
host3|low*|drained|4|8000|gpu:h100:4(S:0-1)
host4|low*|idle*|4|4000|(null)
far1|far|down|64|9000|(null)
"""


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (["--ntasks=16"], ["host3", "host4"]),
        (["--ntasks=17"], []),
        (["--ntasks=8"], []),  # It fits on those that are up: something else keeps it from them.
        (["--ntasks=9", "-x host4"], ["host3"]),
        (["--ntasks=13", "--exclude=host[3-4]"], []),
        (["--nodes=4", "--ntasks-per-node=1"], ["host3", "host4"]),
        (["--nodes=5", "--ntasks-per-node=1"], []),
        (["--nodes=1", "--ntasks=5"], []),
        (["--nodes=2-3", "--ntasks=12"], ["host3", "host4"]),
        (["--nodes=2-3", "--ntasks=13"], []),
        (["--ntasks=5", "--cpus-per-task=2"], ["host3", "host4"]),
        (["--ntasks=1", "--mem=6G"], ["host3", "host4"]),
        (["--ntasks=1", "--mem=90G"], []),
        (["--ntasks=4", "--mem-per-cpu=2000M", "--nodes=1"], ["host3", "host4"]),
        (["--ntasks=3", "--nodes=1", "--gpus-per-task=h100:1"], ["host3", "host4"]),
        (["--ntasks=1", "--gres=gpu:5"], []),
        (["--ntasks=1", "-w host3"], ["host3", "host4"]),
        (["--ntasks=1", "--nodelist=host9"], []),
        (["--ntasks=64", "--partition=far"], ["far1"]),
        (["--ntasks=64", "--partition=high"], []),
    ],
)
def test_a_job_waits_for_nodes_that_could_hold_it(options: list[str], expected: list[str]) -> None:
    partition = next((one.partition("=")[2] for one in options if one.startswith("--partition")), None)
    assert missing_nodes(options, parse_node_resources(_NODES, partition)) == expected


def test_what_is_no_line_of_nodes_is_left_out() -> None:
    assert parse_node_resources("slurm_load_partitions: Unable to contact slurm controller\n\n", None) == []
    assert missing_nodes([], []) == []
