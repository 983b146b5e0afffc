import pytest

from dstrial.doctor import variables


def judged(**environ):
    return {finding.name: finding for finding in variables.judge(environ)}


def test_without_any_there_is_one_line():
    assert [finding.status for finding in variables.judge({"HOME": "/root", "PATH": "/bin"})] == ["ok"]


@pytest.mark.parametrize(
    ("environ", "name", "status"),
    [
        ({"DS_ACCELERATOR": "gpu"}, "DS_ACCELERATOR", "problem"),
        ({"DS_ACCELERATOR": "cuda"}, "DS_ACCELERATOR", "ok"),
        ({"RANK": "0", "WORLD_SIZE": "4"}, "RANK, WORLD_SIZE", "note"),
        ({"MASTER_PORT": "29500"}, "MASTER_PORT", "ok"),
        ({"CUDA_LAUNCH_BLOCKING": "1"}, "CUDA_LAUNCH_BLOCKING", "note"),
        ({"CUDA_LAUNCH_BLOCKING": "0"}, "CUDA_LAUNCH_BLOCKING", "ok"),
        ({"NCCL_P2P_DISABLE": "1"}, "NCCL_P2P_DISABLE", "note"),
        ({"DSTRIAL_SHARE_DEVICE": "1"}, "DSTRIAL_SHARE_DEVICE", "note"),
        ({"NCCL_DEBUG": "INFO"}, "NCCL_DEBUG", "ok"),
        ({"TMPDIR": "/nonexistent"}, "TMPDIR", "problem"),
        ({"PYTHONPATH": "/nonexistent"}, "PYTHONPATH", "note"),
        ({"TORCH_EXTENSIONS_DIR": "/tmp/x"}, "TORCH_EXTENSIONS_DIR", "ok"),
        ({"PYTHONOPTIMIZE": "1"}, "PYTHONOPTIMIZE", "note"),
        ({"CUDA_HOME": "/nonexistent"}, "CUDA_HOME", "note"),
        ({"http_proxy": "http://proxy:3128"}, "http_proxy", "problem"),
        ({"http_proxy": "http://proxy:3128", "no_proxy": "localhost,127.0.0.1"}, "http_proxy", "ok"),
        ({"HTTP_PROXY": "http://proxy:3128", "NO_PROXY": "*"}, "HTTP_PROXY", "ok"),
    ],
)
def test_a_variable_that_changes_trainings_is_told(environ, name, status):
    assert judged(**environ)[name].status == status


def test_passwords_in_addresses_are_not_shown():
    found = judged(http_proxy="http://ada:secret@proxy:3128", DET_MASTER="https://ada:secret@host:8080")
    assert "secret" not in "".join(finding.what for finding in found.values())
    assert "proxy:3128" in found["http_proxy"].what


def test_variables_that_hold_secrets_or_nothing_of_ours_are_left_out():
    assert list(judged(DET_PASS="x", AWS_SECRET_ACCESS_KEY="y", HF_TOKEN="z", CUDA_VISIBLE_DEVICES="")) == [
        "variables"
    ]
    assert len(judged(NCCL_TOPO_FILE="x" * 5000)["NCCL_TOPO_FILE"].what) < 300


def test_paths_that_no_file_system_takes_are_told_like_missing_ones(tmp_path):
    long = "/" + "x" * 300
    found = judged(TMPDIR=long, PYTHONPATH=long, CUDA_HOME=long)
    assert [found[name].status for name in ("TMPDIR", "PYTHONPATH", "CUDA_HOME")] == [
        "problem",
        "note",
        "note",
    ]
    (tmp_path / "file").touch()
    assert judged(TMPDIR=str(tmp_path / "file"))["TMPDIR"].status == "problem"
    assert judged(TMPDIR=str(tmp_path))["TMPDIR"].status == "ok"
