"""Record runs of two CPU ranks: run files, checkpoints and rank environments."""

from __future__ import annotations

import json
import os
import pickletools
import platform
import re
import subprocess
import sys
import zipfile
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
import yaml
from normalization import normalized
from record import HERE, ROOT

_MODEL = HERE / "model"
_DEADLINE_S = 240.0
# Replaced by a placeholder: the last digits of losses depend on the processor.
_MEASURED = ("loss", "validation_loss", "batches_per_second", "samples_per_second")
_DIGEST = re.compile(r"\b[0-9a-f]{64}\b")
CASES = {
    "data parallel": ("DataParallelTrial", {"zero_optimization": {"stage": 1}}, {}),
    "pipeline": ("PipelineTrial", {}, {"data": {"dstrial": {"pipeline_stages": 2}}}),
}
"""Name -> trial class, extra DeepSpeed config, extra experiment config."""


def runs(scratch: Path) -> dict[str, str]:
    """Record text files, file names, pickled classes and rank environments of runs."""
    files = {}
    for name, (trial, deepspeed, more) in CASES.items():
        found = _trained(scratch / name, experiment(trial, deepspeed, more))
        label = name.replace(" ", "_")
        files |= {f"{label}.{file}": text for file, text in found.items()}
    return files


def experiment(trial: str, deepspeed: Mapping[str, Any], more: Mapping[str, Any]) -> dict[str, Any]:
    """Return an experiment of three batches with two checkpoints."""
    return {
        "name": "golden",
        "entrypoint": f"python3 -m dstrial.launch --trial golden_trials:{trial}",
        "hyperparameters": {
            "deepspeed_config": {
                "train_micro_batch_size_per_gpu": 4,
                "gradient_accumulation_steps": 2,
                "optimizer": {"type": "Adam", "params": {"lr": 0.01, "torch_adam": True}},
                "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 10}},
                **deepspeed,
            }
        },
        "resources": {"slots_per_trial": 2},
        "searcher": {"name": "single", "metric": "validation_loss", "max_length": {"batches": 3}},
        "min_validation_period": {"batches": 2},
        "min_checkpoint_period": {"batches": 2},
        "reproducibility": {"experiment_seed": 3},
        **more,
    }


def _trained(scratch: Path, config: Mapping[str, Any]) -> dict[str, str]:
    scratch.mkdir()
    (scratch / "output").mkdir()
    (scratch / "golden.yaml").write_text(yaml.safe_dump(dict(config)))
    trial = config["entrypoint"].rpartition(" ")[2]
    given = {
        **plain_environment(),
        "OMP_NUM_THREADS": "1",
        "DS_ACCELERATOR": "cpu",
        "DSTRIAL_RUNS_DIR": str(scratch / "runs"),
        "GOLDEN_OUTPUT": str(scratch / "output"),
    }
    command = [
        sys.executable,
        "-m",
        "dstrial.launch",
        "--slots",
        "2",
        "--config",
        str(scratch / "golden.yaml"),
    ]
    command += ["--context-dir", str(_MODEL), "--trial", trial]
    done = subprocess.run(
        command, env=given, cwd=scratch, capture_output=True, text=True, timeout=_DEADLINE_S, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (run,) = (scratch / "runs" / "golden").iterdir()
    places = {str(run): "run", run.name: "run name", str(scratch): "scratch", **installation()}
    return described(run, places) | {"environment.json": _environments(scratch / "output", given, places)}


def plain_environment() -> dict[str, str]:
    """Return the variables of this process that a program needs to start."""
    needed = ("HOME", "LANG", "LD_LIBRARY_PATH", "PATH", "TMPDIR", "USER")
    return {name: os.environ[name] for name in needed if name in os.environ}


def installation() -> dict[str, str]:
    """Return placeholders for this installation's paths and versions: value -> name."""
    (site,) = ROOT.glob("dstrial/**/sitecustomize.py")
    (programs,) = ROOT.glob("dstrial/**/bin/deepspeed")
    versions = {
        f'"{version(name)}"': f"{name} version" for name in ("deepspeed", "determined", "dstrial", "torch")
    }
    return {
        str(_MODEL): "model",
        str(site.parent): "site directory",
        str(programs.parent): "bin directory",
        str(ROOT): "repository",
        str(Path.home()): "home",
        sys.executable: "python",
        str(Path(sys.executable).parent): "directory of python",
        f'"torch-{torch.__version__}"': "torch-version",  # includes the build, for example +cpu
        f'"{platform.python_version()}"': "python version",
        **versions,
    }


def described(run: Path, literals: Mapping[str, str]) -> dict[str, str]:
    """Return the normalized text files of a run and of its last checkpoint."""
    checkpoints = sorted(
        (run / "checkpoints").iterdir(),
        key=lambda path: json.loads((path / "metadata.json").read_text())["steps_completed"],
    )
    literals = {
        **literals,
        **{path.name: f"checkpoint {idx + 1}" for idx, path in enumerate(checkpoints)},
        **{path.name: "event file" for path in run.rglob("events.out.tfevents.*")},
    }
    files = {}
    for path in sorted(run.iterdir()):
        if path.suffix in (".json", ".jsonl", ".yaml"):
            files[path.name] = path.read_text()
    files["telemetry.json"] = json.dumps(_unmeasured(json.loads(files["telemetry.json"])), indent=2) + "\n"
    rows = [json.loads(line) for line in files["metrics.jsonl"].splitlines()]
    for row in rows:
        if row["group"] == "telemetry":
            row["metrics"] = _unmeasured(row["metrics"])
    files["metrics.jsonl"] = "".join(f"{json.dumps(row)}\n" for row in rows)
    last = checkpoints[-1]
    for path in sorted(last.iterdir()):
        if path.is_file() and (path.suffix == ".json" or not path.suffix):
            files[f"checkpoint.{path.name}"] = path.read_text()
            # Digests of weights depend on the processor; other tests verify them.
            literals |= dict.fromkeys(_DIGEST.findall(files[f"checkpoint.{path.name}"]), "digest")
    classes = {path.name: class_names(path) for path in sorted(last.rglob("*.pt"))}
    files["classes.json"] = json.dumps(classes, indent=1) + "\n"
    texts = {name: normalized(text, literals, _MEASURED) for name, text in files.items()}
    every = (normalized(str(path.relative_to(run)), literals) for path in run.rglob("*") if path.is_file())
    return texts | {"files.txt": "".join(f"{name}\n" for name in sorted(every))}


def _unmeasured(value: Any) -> Any:
    """Return a document with all numbers and device names replaced by placeholders."""
    if isinstance(value, dict):
        return {
            key: "<device>" if key == "device" else _unmeasured(inner) for key, inner in sorted(value.items())
        }
    if isinstance(value, list):
        return [_unmeasured(inner) for inner in value]
    return "<measured>" if isinstance(value, (int, float)) else value


def class_names(path: Path) -> list[str]:
    """Return the pickled globals of a ``torch.save`` file, each as ``module name``."""
    found = set()
    with zipfile.ZipFile(path) as archive:
        for member in archive.namelist():
            if member.endswith("data.pkl"):
                found |= _globals(archive.read(member))
    return sorted(found)


def _globals(pickled: bytes) -> set[str]:
    found: set[str] = set()
    texts: list[str] = []
    for opcode, argument, _ in pickletools.genops(pickled):
        if opcode.name == "GLOBAL":
            found.add(str(argument))
        elif opcode.name == "STACK_GLOBAL":
            found.add(" ".join(texts[-2:]))
        elif "UNICODE" in opcode.name:
            texts.append(str(argument))
    return found


def _environments(folder: Path, given: Mapping[str, str], literals: Mapping[str, str]) -> str:
    """Return, as JSON, the variables of each rank that differ from the launcher's."""
    seen = {path.stem: json.loads(path.read_text()) for path in sorted(folder.glob("rank_*.json"))}
    first = seen["rank_0"]
    own = {
        f'"{first["DSTRIAL_LAUNCHER_PID"]}"': "pid of the launcher",
        first["DSTRIAL_SECRET"]: "secret",
        first["TORCHELASTIC_RUN_ID"]: "run id",
        first["MASTER_PORT"]: "port",
        str(Path(first["DSTRIAL_PHASE_FILE"]).parent): "directory of the launcher",
        Path(first["DSTRIAL_TRACEBACK_FILE"]).parent.name: "time and pid",
    }
    changed = {}
    for rank, variables in seen.items():
        more = {name: value for name, value in sorted(variables.items()) if given.get(name) != value}
        changed[rank] = more | {name: None for name in sorted(given) if name not in variables}
    return normalized(json.dumps(changed, indent=1) + "\n", {**literals, **own})
