"""``dstrial run`` end to end: commands, ranks, signals and files."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import re
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest
import warm_start
from waiting import wait_for

from dstrial.cli.submit import Submission
from dstrial.local.checkpoint_directory import list_checkpoints
from dstrial.local.json_files import read_json_lines
from dstrial.local.run_directory import RunDirectory, RunState
from dstrial.master.store.views.observe import ExperimentView, experiment_view
from dstrial.testing.master import MasterForTest, master_for_test

DEADLINE_S = 240

CONFIG = """
name: {name}
entrypoint: {entrypoint}
searcher: {{name: single, metric: accuracy, smaller_is_better: false, max_length: {{batches: 10}}}}
environment: {{environment_variables: ["FROM_CONFIG=yes"]}}
"""

CORE_API_SCRIPT = """
import os, sys, time
import determined
from determined import core
from dstrial.local.core_context import mirror
from dstrial.local.run_directory import RunDirectory

rank = int(os.environ["RANK"])
if rank:
    sys.exit()
resume = determined.get_cluster_info().latest_checkpoint or os.environ.get("DSTRIAL_RESUME")
with core.init(
    distributed=core.DummyDistributedContext(), tensorboard_mode=core.TensorboardMode.MANUAL
) as context:
    run_directory = RunDirectory.open(os.environ["DSTRIAL_RUN_DIR"])
    train = mirror(
        context, run_directory, {"searcher": {"metric": "accuracy", "smaller_is_better": False}}
    )
    first = 0
    if resume:
        with context.checkpoint.restore_path(resume) as path:
            first = int((path / "state").read_text())
    train.rewind_to(first)
    print("variables", os.environ["FROM_CONFIG"], os.path.exists("train.py"), sys.argv[1:])
    for batch in range(first + 1, 11):
        context.train.report_training_metrics(batch, {"loss": 1 / batch, "samples_per_second": 10.0})
        train.report_batches(batch, 10)
        is_stopping = False
        if batch == 5 and "wait" in sys.argv and not resume:
            print("waiting for a signal", flush=True)
            while not context.preempt.should_preempt():
                time.sleep(0.01)
            is_stopping = True
        if is_stopping or batch == 10:
            context.train.report_validation_metrics(batch, {"accuracy": batch / 10})
            with context.checkpoint.store_path({"steps_completed": batch}) as (path, _):
                (path / "state").write_text(str(batch))
        if is_stopping:
            break
"""


@dataclasses.dataclass(frozen=True, slots=True)
class Project:
    directory: Path
    config: Path
    runs_dir: Path
    env: Mapping[str, str]

    def command(self, *arguments: str) -> list[str]:
        return [
            *(sys.executable, "-m", "dstrial.cli", "run", str(self.config), str(self.directory)),
            *("--runs-dir", str(self.runs_dir), *arguments),
        ]

    def run(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        return warm_start.run_command(
            self.command(*arguments), capture_output=True, text=True, timeout=DEADLINE_S, env=dict(self.env)
        )

    def run_directories(self) -> list[RunDirectory]:
        return [RunDirectory(path.parent) for path in sorted(self.runs_dir.glob("*/*/run.json"))]


MakeProject = Callable[..., Project]


@pytest.fixture
def make_project(tmp_path: Path, shared_master: MasterForTest) -> MakeProject:
    def make(script: str, entrypoint: str = "python3 train.py", name: str = "my experiment") -> Project:
        directory = tmp_path / "context dir"
        directory.mkdir()
        (directory / "train.py").write_text(script)
        config = tmp_path / "exp file.yaml"
        config.write_text(CONFIG.format(name=name, entrypoint=entrypoint))
        return Project(directory, config, tmp_path / "all runs", shared_master.env)

    return make


@pytest.mark.process
class TestScripts:
    def test_run_prints_reports_warnings_files_and_commands(self, make_project: MakeProject) -> None:
        """The printed ``det`` command works without ``DET_MASTER`` in the environment."""
        project = make_project(CORE_API_SCRIPT, "python3 -m dstrial.launch train.py 'an argument'")
        with project.config.open("a") as file:
            file.write(
                "checkpoint_storage: {type: shared_fs, host_path: /no/such/place, save_trial_best: 1}\n"
            )
            file.write("labels: [one]\n")
        env = {name: value for name, value in project.env.items() if not name.startswith("DET_MASTER")}
        ended = dataclasses.replace(project, env=env).run("--slots", "2")
        assert ended.returncode == 0, ended.stdout + ended.stderr
        assert "[rank 0] variables yes True ['an argument']" in ended.stdout
        assert re.search(
            r"^page: +http://localhost:\d+/det/experiments/\d+ \(.*dstrial login prints", ended.stdout, re.M
        )
        assert "batch 10/10  loss 0.1  10 samples/s" in ended.stdout
        assert "batch 10/10  validation  accuracy 1" in ended.stdout
        (run_directory,) = project.run_directories()
        record = run_directory.read_record()
        assert (record.name, record.state, record.num_attempts) == ("my experiment", RunState.COMPLETED, 1)
        assert "state:         completed at batch 10 of 10" in ended.stdout
        (checkpoint,) = list_checkpoints(run_directory.checkpoints_path)
        for part in (
            str(run_directory.path),
            f"checkpoints/{checkpoint.path.name} (batch 10)",
            "metrics.jsonl, tensorboard, logs/attempt_1",
        ):
            assert part in ended.stdout
        log = run_directory.attempt_logs_path(1) / "rank_0" / "stdout.log"
        assert "variables yes" in log.read_text()

        (warning,) = [line for line in ended.stderr.splitlines() if "does not use" in line]
        assert "exp file.yaml: `dstrial run` does not use checkpoint_storage.host_path" in warning

        printed = re.search(r"^experiment: +(\d+) \((.*)\)$", ended.stdout, re.M)
        assert printed is not None, ended.stdout
        described = subprocess.run(
            shlex.split(printed[2]), capture_output=True, text=True, timeout=DEADLINE_S, env=env
        )
        assert described.returncode == 0, described.stdout + described.stderr
        assert re.search(rf"^ +{printed[1]} \|.* my experiment ", described.stdout, re.M), described.stdout

    @pytest.mark.parametrize(("signal_", "exit_code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
    def test_signal_stops_run_with_checkpoint_and_latest_resumes(
        self, make_project: MakeProject, signal_: signal.Signals, exit_code: int
    ) -> None:
        project = make_project(CORE_API_SCRIPT, "python3 train.py wait")
        code, output = run_and_signal(project, project.command(), "waiting for a signal", [signal_])
        assert code == exit_code, output
        assert (
            "stopping all ranks at the same batch, saving a checkpoint; ranks that have not ended after 600 s "
            "(preemption_timeout) are killed (Ctrl-C again to leave that to the master)" in output
        )
        assert f"stopped at batch 5 of 10 ({signal_.name})" in output
        assert re.search(r"resume with: .*--resume latest", output)
        (run_directory,) = project.run_directories()
        assert run_directory.read_record().state is RunState.STOPPED
        ended = project.run("--resume", "latest")
        assert ended.returncode == 0, ended.stdout + ended.stderr
        assert "batch 5/10" not in ended.stdout
        (run_directory,) = project.run_directories()
        record = run_directory.read_record()
        assert (record.state, record.num_attempts) == (RunState.COMPLETED, 2)
        rows = read_json_lines(run_directory.metrics_path)
        assert [row["steps_completed"] for row in rows if row["group"] == "training"] == list(range(1, 11))
        assert run_directory.attempt_logs_path(1).is_dir()

    def test_second_ctrl_c_leaves_pause_to_master(
        self, make_project: MakeProject, shared_master: MasterForTest, tmp_path: Path
    ) -> None:
        may_stop = tmp_path / "may stop"
        waits = f"while not os.path.exists({str(may_stop)!r}):\n                time.sleep(0.01)"
        script = CORE_API_SCRIPT.replace("is_stopping = True", f"{waits}\n            is_stopping = True")
        project = make_project(script, "python3 train.py wait")
        code, output = run_and_signal(
            project, project.command(), "waiting for a signal", [signal.SIGINT, signal.SIGINT]
        )
        assert code == 130
        assert "stopped at batch 5 of 10 (left to the master, which has saved nothing so far)" in output
        assert "lost" not in output
        # DET_MASTER is set, so the printed command needs no address.
        kill = re.search(r"^kill with: +(?:\S*/)?det experiment kill (\d+)$", output, re.M)
        assert kill is not None, output
        (run_directory,) = project.run_directories()
        refused = project.run("--resume", str(run_directory.path))
        assert refused.returncode == 1
        may_stop.touch()
        submission = Submission.read(run_directory)
        assert submission is not None
        assert kill.group(1) == str(submission.experiment_id)

        def view() -> ExperimentView:
            found = experiment_view(shared_master.state, submission.experiment_id)
            assert found is not None
            return found

        wait_for(lambda: view().is_settled, deadline_s=DEADLINE_S)
        assert view().state == "PAUSED"
        assert len(list_checkpoints(run_directory.checkpoints_path)) == 1
        ended = project.run("--resume", "latest")
        assert ended.returncode == 0, ended.stdout + ended.stderr
        again = Submission.read(run_directory)
        assert again is not None
        assert again.experiment_id == submission.experiment_id

    def test_run_interrupted_by_down_continues_after_up(
        self, make_project: MakeProject, tmp_path: Path
    ) -> None:
        may_go_on = tmp_path / "may go on"
        # After the resume the script waits until the second ``dstrial run`` follows it.
        waits = f"    while first and not os.path.exists({str(may_go_on)!r}):\n        time.sleep(0.01)\n"
        script = CORE_API_SCRIPT.replace(
            "    train.rewind_to(first)\n", f"    train.rewind_to(first)\n{waits}"
        )
        project = make_project(script, "python3 train.py wait")
        with master_for_test(tmp_path) as master:
            project = dataclasses.replace(project, env=master.env)
            with started(project, project.command(), stderr=subprocess.STDOUT) as process:
                assert process.stdout is not None
                while "waiting for a signal" not in process.stdout.readline():
                    pass
                assert master.dstrial("down").returncode == 0
                output = process.stdout.read()
                assert process.wait(DEADLINE_S) == 1
            assert re.search(
                r"master: +has ended; experiment 1 continues after the next `(\S*/)?dstrial up`", output
            )
            master.up()
            command = project.command("--resume", "latest")
            with started(project, command, stderr=subprocess.STDOUT) as process:
                assert process.stdout is not None
                first = ""
                while "page:" not in first and process.poll() is None:
                    first += process.stdout.readline()
                may_go_on.touch()
                output = first + process.stdout.read()
                assert process.wait(DEADLINE_S) == 0, output
            view = experiment_view(master.state, 1)
            assert view is not None
            assert (view.state, view.trials[0].num_allocations) == ("COMPLETED", 2)
            assert experiment_view(master.state, 2) is None

    def test_resume_from_named_checkpoint_keeps_later_checkpoints(self, make_project: MakeProject) -> None:
        project = make_project(CORE_API_SCRIPT, "python3 train.py wait")
        # By default the master deletes all but the best and the last checkpoint at an experiment's end.
        keeps_all = ("--config", "checkpoint_storage={save_trial_latest: 9}")
        run_and_signal(project, project.command(*keeps_all), "waiting for a signal", [signal.SIGINT])
        (run_directory,) = project.run_directories()
        (checkpoint,) = list_checkpoints(run_directory.checkpoints_path)
        for resume in (str(checkpoint.path), str(checkpoint.path), str(run_directory.path)):
            ended = project.run(*keeps_all, "--resume", resume)
            assert ended.returncode == 0, ended.stdout + ended.stderr
        assert project.run_directories() == [run_directory]
        superseded = read_json_lines(run_directory.superseded_metrics_path)
        assert [row["steps_completed"] for row in superseded] == [6, 7, 8, 9, 10, 10]
        assert len(list_checkpoints(run_directory.checkpoints_path)) == 3

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            (["--resume", "latest"], "no run of 'my experiment' with the context directory"),
            (["--resume", "nowhere"], "expected 'latest', a run directory, or the directory of a complete"),
            (["--config", "searcher.name=none"], "searcher.name"),
            (["--test"], "expected a trial class"),
            (["--runs-dir", __file__], "cannot be made (Not a directory); expected a directory that can be"),
        ],
    )
    def test_invalid_run_leaves_no_run_directory(
        self, make_project: MakeProject, options: list[str], message: str
    ) -> None:
        project = make_project(CORE_API_SCRIPT)
        ended = project.run(*options)
        assert ended.returncode == 1
        assert message in ended.stderr
        assert "Traceback" not in ended.stderr
        assert project.run_directories() == []

    def test_run_dir_option_resumes_existing_run(self, make_project: MakeProject, tmp_path: Path) -> None:
        project = make_project("raise SystemExit(7)", "python3 train.py wait")
        own = tmp_path / "my run"
        command = project.command("--run-dir", str(own))
        assert warm_start.run_command(command, env=dict(project.env), capture_output=True).returncode == 7
        (project.directory / "train.py").write_text(CORE_API_SCRIPT)

        # There is no checkpoint to resume from: the run restarts in the same directory.
        code, output = run_and_signal(project, command, "waiting for a signal", [signal.SIGINT])
        assert code == 130, output
        assert RunDirectory(own).read_record().num_attempts == 2
        ended = warm_start.run_command(command, env=dict(project.env), capture_output=True, text=True)
        assert ended.returncode == 0, ended.stdout + ended.stderr
        assert "resuming from checkpoint" in ended.stdout
        rows = read_json_lines(RunDirectory(own).metrics_path)
        assert [row["steps_completed"] for row in rows if row["group"] == "training"] == list(range(1, 11))
        assert project.run_directories() == [], "none beside it"
        shutil.rmtree(own)
        (project.directory / "train.py").write_text("")
        ended = warm_start.run_command(command, env=dict(project.env), capture_output=True, text=True)
        assert ended.returncode == 0, ended.stdout + ended.stderr
        assert RunDirectory(own).read_record().num_attempts == 1


@contextlib.contextmanager
def started(
    project: Project,
    command: list[str],
    stderr: int = subprocess.PIPE,
    popen: type[subprocess.Popen[str]] = warm_start.Popen,
) -> Iterator[subprocess.Popen[str]]:
    with popen(command, stdout=subprocess.PIPE, stderr=stderr, text=True, env=dict(project.env)) as process:
        try:
            yield process
        finally:
            process.kill()


def run_and_signal(
    project: Project, command: list[str], line: str, signals: list[signal.Signals]
) -> tuple[int, str]:
    """Run a command; send the first signal at ``line``, others at the Ctrl-C hint."""
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=dict(project.env)
    )
    output = []
    waiting = list(signals)
    try:
        assert process.stdout is not None
        for shown in process.stdout:
            output.append(shown)
            if waiting and (line in shown or "to leave that to the master" in shown):
                process.send_signal(waiting.pop(0))
        return process.wait(DEADLINE_S), "".join(output)
    finally:
        process.kill()
        process.wait()


TRIAL = """
import torch, deepspeed
from dstrial import DataLoader, DeepSpeedTrial

class Data(torch.utils.data.Dataset):
    def __len__(self):
        return 64
    def __getitem__(self, idx):
        x = torch.tensor([float(idx % 7)])
        return x, 2 * x

class LineTrial(DeepSpeedTrial):
    def __init__(self, context):
        self.context = context
        model = torch.nn.Linear(1, 1)
        config = context.get_hparam("deepspeed_config")
        engine, _, _, _ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
        self.engine = context.wrap_model_engine(engine)
    def build_training_data_loader(self):
        return DataLoader(Data(), batch_size=self.context.get_train_micro_batch_size_per_gpu(), shuffle=True)
    def build_validation_data_loader(self):
        return DataLoader(Data(), batch_size=8)
    def _loss(self, batch):
        x, y = batch
        return torch.nn.functional.mse_loss(self.engine(x), y)
    def train_batch(self, iterator, epoch_idx, batch_idx):
        loss = self._loss(self.context.to_device(next(iterator)))
        self.engine.backward(loss)
        self.engine.step()
        return {"loss": loss}
    def evaluate_batch(self, iterator, batch_idx):
        return {"accuracy": -self._loss(self.context.to_device(next(iterator)))}
"""

TRIAL_CONFIG = """
name: line
entrypoint: train:LineTrial
searcher: {name: single, metric: accuracy, smaller_is_better: false, max_length: {batches: 4000}}
scheduling_unit: 5
resources: {slots_per_trial: 2}
checkpoint_policy: none
hyperparameters: {deepspeed_config: ds_config.json}
"""


DEEPSPEED_CONFIG = {
    "train_batch_size": 8,
    "optimizer": {"type": "Adam", "params": {"lr": 0.001, "torch_adam": True}},
}


@pytest.mark.ranks
def test_trial_is_tested_stopped_and_resumed(
    make_project: MakeProject,
) -> None:
    """Both ranks stop at the same batch, where the resumed run continues."""
    project = make_project(TRIAL)
    project.config.write_text(TRIAL_CONFIG)
    (project.directory / "ds_config.json").write_text(json.dumps(DEEPSPEED_CONFIG))
    tested = project.run("--test")
    assert tested.returncode == 0, tested.stdout + tested.stderr
    assert "test passed: 2 batches, one validation, one checkpoint written and loaded again" in tested.stdout
    assert project.run_directories() == []

    code, output = run_and_signal(project, project.command(), "batch 10/4000", [signal.SIGINT])
    assert code == 130, output
    (run_directory,) = project.run_directories()
    stopped_at = list_checkpoints(run_directory.checkpoints_path)[-1].steps_completed
    assert 10 <= stopped_at < 4000
    assert f"stopped at batch {stopped_at} of 4000 (SIGINT)" in output

    length = stopped_at + 7
    faster = {"optimizer": {"type": "Adam", "params": {"lr": 0.002, "torch_adam": True}}}
    (project.directory / "ds_config.json").write_text(json.dumps(DEEPSPEED_CONFIG | faster))
    until = f"searcher.max_length={{batches: {length}}}"
    ended = project.run(
        "--resume", "latest", "--config", until, "--config", "data.dstrial.override_optimizer=true"
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "lr 0.002, in the checkpoint 0.001; this run's settings count" in ended.stdout + ended.stderr
    assert f"completed at batch {length} of {length}" in ended.stdout
    reported = [
        row["steps_completed"]
        for row in read_json_lines(run_directory.metrics_path)
        if row["group"] == "training"
    ]
    assert reported == [*range(5, length, 5), length] if length % 5 else list(range(5, length + 1, 5))
    assert list((run_directory.tensorboard_path).glob("events*"))
    assert json.loads(run_directory.record_path.read_text())["num_attempts"] == 2

    ended = project.run("--resume", "latest", "--config", f"searcher.max_length={{batches: {length}}}")
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert f"completed at batch {length} of {length} (nothing was left to train)" in ended.stdout
    assert run_directory.read_record().state is RunState.COMPLETED


@pytest.mark.ranks
def test_debug_option_trains_in_command_process(make_project: MakeProject) -> None:
    asks = "        if batch_idx == 2:\n            import os\n            print('at', os.getpid(), input())\n        loss ="
    project = make_project(TRIAL.replace("        loss =", asks, 1))
    project.config.write_text(TRIAL_CONFIG)
    (project.directory / "ds_config.json").write_text(json.dumps(DEEPSPEED_CONFIG))
    command = project.command("--debug", "--config", "searcher.max_length.batches=5")
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    with subprocess.Popen(command, env=dict(project.env), text=True, **pipes) as process:  # type: ignore[call-overload]
        output, _ = process.communicate("a word\n", timeout=DEADLINE_S)
    assert process.returncode == 0, output
    assert f"at {process.pid} a word" in output
    (run_directory,) = project.run_directories()
    record = run_directory.read_record()
    assert (record.state, record.num_attempts) == (RunState.COMPLETED, 1)
    assert [found.steps_completed for found in list_checkpoints(run_directory.checkpoints_path)] == [5]
