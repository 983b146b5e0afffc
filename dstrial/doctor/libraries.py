"""This machine's torch, DeepSpeed, Determined, by a probe process or their files."""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import importlib.metadata
import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

_GRACE_S = 3.0
# This very package, also where it runs from a checkout; last in the path, so that what shadows a library for
# trials (a file in the working directory, say) does so here.
_PROGRAM = "import sys; sys.path.append(sys.argv[2]); from dstrial.doctor.import_probe import main; main()"


@dataclasses.dataclass(frozen=True, slots=True)
class TorchBuild:
    """The torch that programs of this environment import.

    Attributes:
        version: as torch itself says.
        file: where it was found.
        cuda: CUDA release that it was built with, for example ``13.0``; None for another build.
        hip: HIP release that it was built with; None for another build.
        nccl: release of NCCL (or RCCL); None without it, or if it is not known.
        architectures: of devices that it has kernels for, for example ``sm_90`` or ``compute_90``; empty if not known.
        is_available: whether it finds a device; None if it was not asked.
        num_devices: how many it finds.
        warnings: what it said about the driver.
        has_gloo: whether it has the collectives of CPU ranks; None if it was not asked.
    """

    version: str
    file: str = ""
    cuda: str | None = None
    hip: str | None = None
    nccl: str | None = None
    architectures: tuple[str, ...] = ()
    is_available: bool | None = None
    num_devices: int = 0
    warnings: tuple[str, ...] = ()
    has_gloo: bool | None = None

    @property
    def kind(self) -> str:
        """What it was built for, in words."""
        if self.cuda is not None:
            return f"CUDA {self.cuda}"
        return "CPU only" if self.hip is None else f"ROCm, HIP {self.hip}"


@dataclasses.dataclass(frozen=True, slots=True)
class Operator:
    """One compiled operator of DeepSpeed.

    Attributes:
        name: DeepSpeed's name of it.
        is_prebuilt: whether it was compiled when DeepSpeed was installed.
        is_compiled: whether an earlier program left it in the folder of compiled extensions.
        is_compatible: whether DeepSpeed would try to compile it here; None if it was not asked.
    """

    name: str
    is_prebuilt: bool
    is_compiled: bool
    is_compatible: bool | None


@dataclasses.dataclass(frozen=True, slots=True)
class DeepSpeedBuild:
    """The DeepSpeed that programs of this environment import.

    Attributes:
        version: as DeepSpeed itself says.
        file: where it was found.
        accelerator: the device that it chose; None if it was not asked.
        cuda_home: where it looks for nvcc; None if nowhere.
        cuda_mismatch: why nvcc cannot compile for this torch; None if it can.
        operators: those of the accelerator; empty if it was not asked.
    """

    version: str
    file: str = ""
    accelerator: str | None = None
    cuda_home: str | None = None
    cuda_mismatch: str | None = None
    operators: tuple[Operator, ...] = ()


@dataclasses.dataclass(frozen=True, slots=True)
class ImportFailure:
    """A library that could not be imported.

    Attributes:
        library: its name.
        reason: the exception, or how the process ended.
        place: file, line and function in which the import hung; empty if it did not hang.
        seconds: how long it took to fail.
    """

    library: str
    reason: str
    place: str = ""
    seconds: float = 0.0


@dataclasses.dataclass(frozen=True, slots=True)
class Libraries:
    """What is known of the libraries that train.

    Attributes:
        torch: None if it is missing or could not be imported.
        deepspeed: likewise.
        is_imported: whether they were imported, or only their files read.
        failures: imports that failed.
        seconds: library -> what its import took.
    """

    torch: TorchBuild | None
    deepspeed: DeepSpeedBuild | None
    is_imported: bool
    failures: tuple[ImportFailure, ...] = ()
    seconds: Mapping[str, float] = dataclasses.field(default_factory=dict)


def import_all(deadline_s: float) -> Libraries:
    """Import the libraries in a process of their own.

    Args:
        deadline_s: when a process that still imports is ended.
    """
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        process = subprocess.Popen(
            [sys.executable, "-c", _PROGRAM, str(deadline_s), str(Path(__file__).resolve().parents[2])],
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=err,
            start_new_session=True,
        )
        try:
            return_code: int | None = process.wait(deadline_s + _GRACE_S)
        except subprocess.TimeoutExpired:
            return_code = None
        finally:
            # The compilers that a probe starts go with it.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        texts = []
        for stream in (out, err):
            stream.seek(0)
            texts.append(stream.read().decode(errors="replace"))
    return read_probe(texts[0], texts[1], return_code, deadline_s)


def read_probe(output: str, errors: str, return_code: int | None, deadline_s: float) -> Libraries:
    """Make values of what the probe wrote.

    Its standard output has lines of JSON; ``return_code`` is negative for a signal, None if it was killed at ``deadline_s``.
    """
    begun = ""
    values: dict[str, Mapping[str, Any]] = {}
    seconds: dict[str, float] = {}
    failures: list[ImportFailure] = []
    for line in output.splitlines():
        record = json.loads(line)
        if "begins" in record:
            begun = record["begins"]
            continue
        begun = ""
        seconds[record["stage"]] = record["seconds"]
        if "error" in record:
            if any(failure.reason == record["error"] for failure in failures):
                continue  # dstrial cannot be imported for the reason for which deepspeed cannot
            failures.append(ImportFailure(record["stage"], record["error"], seconds=record["seconds"]))
        else:
            values[record["stage"]] = record["values"]
    if begun or return_code != 0:
        failures.append(_unfinished(begun or "torch", errors, return_code, deadline_s))
    torch, deepspeed = values.get("torch"), values.get("deepspeed")
    return Libraries(
        torch=None if torch is None else _torch_build(torch),
        deepspeed=None if deepspeed is None else _deepspeed_build(deepspeed),
        is_imported=True,
        failures=tuple(failures),
        seconds=seconds,
    )


def _unfinished(library: str, errors: str, return_code: int | None, deadline_s: float) -> ImportFailure:
    """Say how a stage ended that did not say so itself."""
    is_hanging = return_code is None or "Timeout (" in errors
    if is_hanging:
        frames = re.findall(r'^  File "(.+?)", line (\d+) in (.+)$', errors, re.MULTILINE)
        own = [frame for frame in frames if not frame[0].startswith("<")]
        place = "" if not own else f"{own[0][0]}:{own[0][1]} in {own[0][2]}"
        return ImportFailure(library, f"not imported within {deadline_s:.0f} s", place, deadline_s)
    lines = [line.strip() for line in errors.splitlines() if line.strip()]
    said = f", after saying {lines[-1]!r}" if lines else ""
    if return_code is not None and return_code < 0:
        name = signal.Signals(-return_code).name
        return ImportFailure(library, f"its import ended the process by {name}{said}")
    return ImportFailure(library, f"its import ended the process with status {return_code}{said}")


def _torch_build(values: Mapping[str, Any]) -> TorchBuild:
    return TorchBuild(
        version=values["version"],
        file=values["file"],
        cuda=values["cuda"],
        hip=values["hip"],
        nccl=values["nccl"],
        architectures=tuple(values["architectures"]),
        is_available=values["is_available"],
        num_devices=values["num_devices"],
        warnings=tuple(values["warnings"]),
        has_gloo=values["has_gloo"],
    )


def _deepspeed_build(values: Mapping[str, Any]) -> DeepSpeedBuild:
    return DeepSpeedBuild(
        version=values["version"],
        file=values["file"],
        accelerator=values["accelerator"],
        cuda_home=values["cuda_home"],
        cuda_mismatch=values["cuda_mismatch"],
        operators=tuple(Operator(name, **facts) for name, facts in values["operators"].items()),
    )


def read_files() -> Libraries:
    """Read what the files of the libraries say, importing none of them."""
    torch_file, deepspeed_file = _origin("torch"), _origin("deepspeed")
    torch = deepspeed = None
    if torch_file is not None:
        names = assignments(torch_file.with_name("version.py"))
        torch = TorchBuild(
            version=str(names.get("__version__") or installed_version("torch")),
            file=str(torch_file),
            cuda=names.get("cuda"),
            hip=names.get("hip"),
            nccl=_packaged_nccl(),
        )
    if deepspeed_file is not None:
        names = assignments(deepspeed_file.with_name("git_version_info_installed.py"))
        deepspeed = DeepSpeedBuild(
            version=str(names.get("version") or installed_version("deepspeed")), file=str(deepspeed_file)
        )
    missing = [
        ImportFailure(name, "not installed")
        for name, file in (("torch", torch_file), ("deepspeed", deepspeed_file))
        if file is None
    ]
    return Libraries(torch, deepspeed, is_imported=False, failures=tuple(missing))


def assignments(file: Path) -> dict[str, Any]:
    """Return the constants of a module's top-level assignments without running it."""
    try:
        tree = ast.parse(file.read_text(encoding="utf-8"))
    except (OSError, SyntaxError, ValueError):
        return {}
    found: dict[str, Any] = {}
    for statement in tree.body:
        if isinstance(statement, ast.Assign) and isinstance(statement.targets[0], ast.Name):
            target, value = statement.targets[0], statement.value
        elif (
            isinstance(statement, ast.AnnAssign)
            and isinstance(statement.target, ast.Name)
            and statement.value
        ):
            target, value = statement.target, statement.value
        else:
            continue
        with contextlib.suppress(ValueError):
            found[target.id] = ast.literal_eval(value)
    return found


def installed_version(distribution: str) -> str | None:
    """Return the version in a distribution's metadata; None if it is not installed."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def _origin(package: str) -> Path | None:
    try:
        spec = importlib.util.find_spec(package)
    except (ImportError, ValueError):
        return None
    return None if spec is None or spec.origin is None else Path(spec.origin)


def _packaged_nccl() -> str | None:
    return next(
        (
            found
            for name in ("nvidia-nccl-cu13", "nvidia-nccl-cu12", "nvidia-nccl-cu11")
            if (found := installed_version(name)) is not None
        ),
        None,
    )
