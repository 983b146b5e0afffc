"""``dstrial checkpoint export``: consolidate the weights of a checkpoint."""

from __future__ import annotations

import argparse
import contextlib
import re
import secrets
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from dstrial.checkpoint.integrity import damaged_error, verify_files
from dstrial.checkpoint.manifest import engine_folder, rank_state_name
from dstrial.cli.checkpoint import (
    CheckpointSource,
    OpenCheckpoint,
    add_action,
    add_shared_options,
    open_checkpoint,
)
from dstrial.cli.streams import bytes_bar, count_argument
from dstrial.errors import CheckpointError, CheckpointLayoutError
from dstrial.visible_text import plural, size_text

if TYPE_CHECKING:
    from argparse import _SubParsersAction

    from dstrial.engine.export import ModelWeights

_DTYPES = {
    "float32": "float32", "fp32": "float32", "bfloat16": "bfloat16", "bf16": "bfloat16", "float16": "float16",
    "fp16": "float16", "float64": "float64", "module": None,
}  # fmt: skip
_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12,
          "KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}  # fmt: skip
_DEFAULT_SHARD = "5GB"

_EPILOG = """\
safetensors: one file. torch: one file with a state_dict. hf: a directory with sharded safetensors and an index. hf also
copies config.json and tokenizer files from --files-from, else from the run's model definition or the checkpoint.
adapter: a directory with adapter_config.json and adapter_model.safetensors, which PeftModel.from_pretrained loads.
Names are those of the module's state_dict, persistent buffers included. Tied weights are written once. A safetensors file
has their further names in its metadata; in a torch file, the names share one storage.
The memory that the export needs does not grow with the model. While torch writes, the disk needs room for a second file.

examples:
  dstrial checkpoint export CHECKPOINT model.safetensors --format safetensors
  dstrial checkpoint export CHECKPOINT weights.pt --format torch --dtype module
  dstrial checkpoint export 6b3c3b0e-6d0f-4a55-8f1e-0d1b2b6f2c11 my-model --format hf --dtype bf16 --max-shard-size 2GB
"""


def add_parser(actions: _SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = add_action(
        actions,
        "export",
        help="write the consolidated weights as safetensors, for torch.load, or as a Hugging Face model",
        description="Write the weights of a checkpoint as one model, whatever its ZeRO stage and pipeline stages. Files are "
        "verified before they are read. OUTPUT must not exist; OUTPUT appears when it is complete.",
        epilog=_EPILOG,
    )
    parser.add_argument("output", metavar="OUTPUT", help="file to write; for hf a directory")
    parser.add_argument(
        "--format",
        choices=("safetensors", "torch", "hf", "adapter"),
        help="format of OUTPUT (default: adapter if the run has trained a PEFT adapter and --merged is not given, else "
        "safetensors)",
    )
    parser.add_argument(
        "--merged", action="store_true", help="add a LoRA adapter to the weights of its base model"
    )
    parser.add_argument(
        "--dtype",
        choices=tuple(_DTYPES),
        default="float32",
        help="data type of floating-point weights; module: the type in which the model was trained (default: %(default)s)",
    )
    parser.add_argument(
        "--engine",
        type=count_argument,
        metavar="N",
        help="index of the engine, from 0, if the trial has several engines",
    )
    parser.add_argument(
        "--max-shard-size",
        type=size_argument,
        metavar="SIZE",
        help=f"maximum size of a file of format hf, such as 500MB (default: {_DEFAULT_SHARD})",
    )
    parser.add_argument(
        "--files-from", metavar="DIR", help="directory with config.json and tokenizer files, for format hf"
    )
    parser.add_argument(
        "--no-verify", action="store_true", help="do not compare the files with their checksums first"
    )
    add_shared_options(parser)


def size_argument(text: str) -> int:
    """Parse a size such as ``5GB``, ``500MiB`` or ``1000`` to a number of bytes."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([A-Za-z]*)", text.strip())
    if match is None or match[2].upper() not in _UNITS or float(match[1]) * _UNITS[match[2].upper()] < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no size; expected for example 5GB or 500MiB")
    return int(float(match[1]) * _UNITS[match[2].upper()])


def main(args: argparse.Namespace) -> int:
    """Export a checkpoint's weights; return 0, or 2 for incompatible options."""
    for option, value in (("--max-shard-size", args.max_shard_size), ("--files-from", args.files_from)):
        if value is not None and args.format != "hf":
            given = f"with --format {args.format}" if args.format else "without --format"
            sys.stderr.write(f"{option} is given {given}; expected --format hf.\n")
            return 2
    if args.merged and args.format == "adapter":
        sys.stderr.write("--merged is given with --format adapter; expected safetensors, torch or hf.\n")
        return 2
    output = Path(args.output).absolute()
    opened = open_checkpoint(args.checkpoint, args)
    require_new(output)
    engine_idx = _engine_idx(opened, args.engine)
    if args.format is None:
        has_adapter = bool(opened.layouts[engine_idx].adapter) and not args.merged
        args.format = "adapter" if has_adapter else "safetensors"
    _check_files(opened, engine_idx, verifies=not args.no_verify)
    weights = _weights(opened, engine_idx, args)
    if weights.unequal:
        sys.stderr.write(
            f"warning: the copies of {', '.join(weights.unequal)} on the pipeline's stages differ, because its layers tie only "
            "what tied_weight_attr names; those of the first stage are exported\n"
        )
    _write(args, opened.source, weights, output, opened.layouts[engine_idx].folder)
    note = f"; tied: {', '.join(weights.aliases)}" if weights.aliases else ""
    content = f"{len(weights.specs)} tensors, {size_text(weights.num_bytes)}"
    sys.stdout.write(f"{output}: {content}, of batch {opened.manifest.steps_completed}{note}\n")
    return 0


def require_new(output: Path) -> None:
    """Raise ``CheckpointError`` if the output exists or its parent does not."""
    if output.exists() or output.is_symlink():
        raise CheckpointError(
            f"OUTPUT is {str(output)!r}, which exists; expected a path where nothing is. Name another one."
        )
    if not output.parent.is_dir():
        raise CheckpointError(
            f"OUTPUT is {str(output)!r}, and {output.parent} is no directory; expected one to write into. Make it."
        )


def _engine_idx(opened: OpenCheckpoint, asked: int | None) -> int:
    count = len(opened.layouts)
    if not count:
        raise CheckpointLayoutError(
            f"checkpoint {opened.path} holds no DeepSpeed engine; expected one. Read the model that its Trainer has saved as it "
            "is: from_pretrained(CHECKPOINT/checkpoint-<step>)."
        )
    if asked is None and count == 1:
        return 0
    if asked is None or asked >= count:
        given = "not given" if asked is None else str(asked)
        raise CheckpointError(
            f"--engine is {given}, and checkpoint {opened.path} holds {plural(count, 'engine')}; expected "
            f"one of 0 to {count - 1}. Name one."
        )
    return asked


def _check_files(opened: OpenCheckpoint, engine_idx: int, *, verifies: bool) -> None:
    """Raise unless an engine's weights exist and, if ``verifies``, match the manifest.

    Raises:
        CheckpointLayoutError: the checkpoint has no DeepSpeed files with weights of the engine.
        CheckpointDamagedError: files are missing or differ from the manifest.
    """
    layout, files = opened.layouts[engine_idx], opened.manifest.files
    folder = layout.folder or engine_folder(files, engine_idx)
    names = [name for name in files if name.startswith(f"{folder}/")]
    if not any(name.endswith("_states.pt") for name in names):
        raise CheckpointLayoutError(
            f"checkpoint {opened.path} holds no weights of engine {engine_idx} in DeepSpeed's form, because its trial writes its "
            "checkpoints itself; expected what DeepSpeedTrial.save writes. Export them with the trial's own code."
        )
    if not verifies:
        return
    names += [name for name in map(rank_state_name, range(layout.world_size)) if name in files]
    total = sum(opened.manifest.files[name].num_bytes for name in names)
    with bytes_bar("verifying", total) as advance:
        damages = verify_files(opened.path, opened.manifest, names, advance)
    if damages:
        raise damaged_error(opened.path, damages)


def _weights(opened: OpenCheckpoint, engine_idx: int, args: argparse.Namespace) -> ModelWeights:
    import torch

    from dstrial.engine import export
    from dstrial.engine.checkpoint_reader.open import open_saved_engine

    name = _DTYPES[args.dtype]
    layout = opened.layouts[engine_idx]
    saved = open_saved_engine(opened.path, engine_idx, layout, trusts_code=args.trust_code)
    kind = export.AdapterWeights if args.format == "adapter" else export.ModelWeights
    return (export.MergedWeights if args.merged else kind)(
        saved, None if name is None else getattr(torch, name)
    )


def _write(
    args: argparse.Namespace, source: CheckpointSource, weights: ModelWeights, output: Path, folder: str
) -> None:
    from dstrial.engine import export

    with (
        _atomic_output(output) as temporary,
        bytes_bar("writing", weights.num_bytes) as advance,
    ):
        if args.format == "safetensors":
            export.write_safetensors(weights, temporary, on_bytes=advance)
        elif args.format == "torch":
            export.write_torch(weights, temporary, on_bytes=advance)
        elif isinstance(weights, export.AdapterWeights):
            export.write_adapter(weights, temporary, advance)
        else:
            export.write_hugging_face(
                weights,
                temporary,
                max_shard_bytes=args.max_shard_size or size_argument(_DEFAULT_SHARD),
                files=[
                    path
                    for path in export.find_model_files(_file_directories(args.files_from, source, folder))
                    if not _resolves_outside(path, source.path)
                ],
                on_bytes=advance,
            )


def _resolves_outside(path: Path, root: Path) -> bool:
    return path.is_relative_to(root) and not path.resolve().is_relative_to(root.resolve())


def _file_directories(asked: str | None, source: CheckpointSource, folder: str) -> Iterator[Path]:
    if asked is not None:
        yield Path(asked)
    if folder:
        # Hugging Face's Trainer writes these files beside the engine's directory.
        yield (source.path / folder).parent
    if source.run_directory is not None:
        yield Path(source.run_directory.read_record().context_dir)
    yield source.path / "code"
    yield source.path


@contextlib.contextmanager
def _atomic_output(output: Path) -> Iterator[Path]:
    """Yield a temporary path that is renamed to ``output``, or deleted on failure."""
    temporary = output.with_name(f".{output.name}.{secrets.token_hex(4)}.writing")
    try:
        yield temporary
        require_new(output)
        temporary.rename(output)
    except OSError as error:
        raise CheckpointError(
            f"{output} cannot be written ({error.strerror or error}); expected room for it in a directory of your own. Make "
            "room, or name another OUTPUT."
        ) from error
    finally:
        if temporary.is_dir():
            shutil.rmtree(temporary, ignore_errors=True)
        else:
            temporary.unlink(missing_ok=True)
