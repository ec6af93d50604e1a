"""`mrl convert`, `mrl verify` and `mrl merge`: arguments, process group, output. Imports torch when it runs."""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mrl.commands.shared import CommandError
from mrl.weights.convert import WORKERS

if TYPE_CHECKING:
    from mrl.parallel import Meshes
    from mrl.weights.convert.convert import ConvertOptions, ConvertReport
    from mrl.weights.model.export import Describe

DTYPES = ("float32", "bfloat16", "float16")
DIRECTIONS = ("hf-to-megatron", "megatron-to-hf")
_NOT_OF_ADAPTERS = ("verify", "dtype", "role", "allow_pickle", "shard_gb", "workers")
SHARD_GB = 5.0
JOIN_TIMEOUT_S = 6 * 3600.0  # wait for the slowest rank of a world


def add_parsers(commands: Any) -> None:
    """Adds the three subcommands."""
    convert = commands.add_parser("convert", help="convert a Hugging Face directory to a Megatron checkpoint, or back")
    convert.add_argument("direction", choices=DIRECTIONS, metavar="|".join(DIRECTIONS))
    convert.add_argument("source", type=Path, metavar="SRC", help="the directory to convert")
    convert.add_argument("target", type=Path, metavar="DST", help="a directory that does not exist, or is empty")
    convert.add_argument("--dtype", choices=DTYPES, help="dtype of all written tensors (default: as stored)")
    convert.add_argument("--workers", type=_positive, metavar="N", help=f"threads per rank (default: {WORKERS})")
    convert.add_argument("--verify", action="store_true", help="compare SRC and DST after the conversion")
    convert.add_argument(
        "--adapter", action="store_true", help="convert only the LoRA adapters of a run, to the PEFT format"
    )
    _add_shard_gb(convert)
    convert.set_defaults(run=run_convert)
    _add_common(convert)
    convert.description = (
        "Streams the weights block by block. DST appears when it is complete. Under torchrun the ranks share the work."
    )
    verify = commands.add_parser("verify", help="prove that a Megatron checkpoint equals a Hugging Face model")
    verify.add_argument("source", type=Path, metavar="HF_DIR")
    verify.add_argument("target", type=Path, metavar="MEGATRON_DIR")
    verify.add_argument("--json", action="store_true", help="print the verdict as JSON instead of a table")
    verify.set_defaults(run=run_verify)
    _add_merge(commands)
    _add_common(verify)
    verify.description = (
        "Compares the name, shape and bits of every tensor, then the logits of fixed prompts in float32. "
        "Exit code 0: equal; 1: different or unreadable."
    )


def _add_merge(commands: Any) -> None:
    merge = commands.add_parser("merge", help="merge LoRA adapters into their base weights")
    merge.add_argument("base", type=Path, metavar="BASE", help="Hugging Face directory of the base weights")
    merge.add_argument("adapter", type=Path, metavar="ADAPTER", help="directory of adapters in the PEFT format")
    merge.add_argument("target", type=Path, metavar="OUT", help="a directory that does not exist, or is empty")
    _add_shard_gb(merge)
    merge.add_argument("--allow-pickle", action="store_true", help="read pytorch_model.bin, tensors only")
    merge.set_defaults(run=run_merge)
    merge.description = (
        "Adds adapters and weights in float32 and rounds once, tensor by tensor. For adapters that mrl wrote, BASE "
        "must hold the weights that they were trained on. OUT appears when it is complete."
    )


def _add_common(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--skip-logits", action="store_true", help="compare tensors only, compute no logits")
    parser.add_argument("--allow-pickle", action="store_true", help="read pytorch_model.bin, tensors only")
    parser.add_argument(
        "--role", choices=("policy", "critic"), help="critic: with a score head (default: as config.json says)"
    )
    what = "which model of a run's step_N: actor (default), critic, or adapters/NAME if the run trains several adapters"
    parser.add_argument("--model", metavar="MODEL", help=what)
    parser.add_argument(
        "--model-files", type=Path, metavar="DIR", help="config.json and tokenizer, for a checkpoint without them"
    )


def _add_shard_gb(parser: argparse.ArgumentParser) -> None:
    about = f"maximum size of a safetensors file (default: {SHARD_GB:g})"
    parser.add_argument("--shard-gb", type=_gigabytes, metavar="GB", help=about)


def _gigabytes(text: str) -> float:
    if not (float(text) > 0 and math.isfinite(float(text) * 1e9)):
        raise argparse.ArgumentTypeError(f"{text}: must be a number of gigabytes above 0")
    return float(text)


def _file_bytes(args: argparse.Namespace) -> int:
    return int((args.shard_gb or SHARD_GB) * 1e9)


def _positive(text: str) -> int:
    if int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text}: must be at least 1")
    return int(text)


def run_convert(args: argparse.Namespace) -> int:
    """Returns the exit code of `mrl convert`."""
    return _in_a_world(lambda meshes: _convert(args, meshes))


def run_verify(args: argparse.Namespace) -> int:
    """Returns the exit code of `mrl verify`."""
    return _in_a_world(lambda meshes: _verify(args.source, args.target, args, meshes, as_json=args.json))


def run_merge(args: argparse.Namespace) -> int:
    """Returns the exit code of `mrl merge`."""
    from mrl.cards import merged_card
    from mrl.weights.errors import WeightError
    from mrl.weights.merge import MergeReport, merge

    def describe(export: Path, result: MergeReport) -> None:
        if note := merged_card(args.base, args.adapter, export, args.target, result.layers, result.rounding):
            print(f"mrl: {note}", file=sys.stderr)

    of = (args.base, args.adapter, args.target)
    try:
        merged = merge(*of, _file_bytes(args), allow_pickle=args.allow_pickle, describe=describe)
    except (WeightError, ValueError, OSError) as error:
        raise CommandError(str(error)) from error
    print("\n".join(merged.lines(args.target)))
    return 0


def _in_a_world(action: Callable[[Meshes], bool]) -> int:
    """Runs `action` in a process group on CPUs: torchrun's, or one of this process alone. 1 if it fails or returns
    False."""
    import torch.distributed as dist

    from mrl.platform import WorldError, init_process_group
    from mrl.weights.errors import WeightError

    try:
        init_process_group(JOIN_TIMEOUT_S, "gloo")
    except WorldError as error:
        raise CommandError(str(error)) from error
    try:
        from mrl.parallel import Meshes

        return 0 if action(Meshes(JOIN_TIMEOUT_S)) else 1
    except (WeightError, ValueError, OSError) as error:
        if dist.get_rank() == 0:
            print(f"mrl: {error}", file=sys.stderr)
        return 1
    finally:
        dist.destroy_process_group()


def _convert(args: argparse.Namespace, meshes: Meshes) -> bool:
    from mrl.parallel import rank, world_size
    from mrl.weights.convert.convert import hf_to_megatron, megatron_to_hf

    if args.verify and world_size() > 1:
        raise ValueError("--verify runs in one process: use `mrl verify` after the conversion")
    if args.skip_logits and not args.verify:
        raise ValueError("--skip-logits needs --verify: without it, nothing is compared")
    to_megatron = args.direction == DIRECTIONS[0]
    if args.adapter:
        return _convert_adapter(args)
    if args.verify and not args.skip_logits:
        _require_memory(args, to_megatron)
    report = (hf_to_megatron if to_megatron else megatron_to_hf)(args.source, args.target, _options(args), meshes)
    if rank() == 0:
        print(_summary(report, args.target))
    if not args.verify:
        return True
    pair = (args.source, args.target) if to_megatron else (args.target, args.source)
    return _verify(*pair, args, meshes, as_json=False)


def _require_memory(args: argparse.Namespace, to_megatron: bool) -> None:
    """Checks memory for the final comparison of logits, with the policy's head, the larger one."""
    from mrl.families import load_arch
    from mrl.weights.compare.logits import require_memory
    from mrl.weights.disk.megatron_dirs import open_megatron

    if to_megatron:
        require_memory(load_arch(args.source), args.role or "policy")
        return
    with open_megatron(args.source, args.model, args.model_files, args.role) as model:
        require_memory(model.arch, model.role)


def _convert_adapter(args: argparse.Namespace) -> bool:
    """Converts adapters in one process, since they are small."""
    from mrl.parallel import world_size
    from mrl.weights.convert.adapter import adapter_of_run

    given = [name for name in _NOT_OF_ADAPTERS if getattr(args, name)]
    if args.direction != DIRECTIONS[1] or given or world_size() > 1:
        what = f"without --{given[0].replace('_', '-')}" if given else "in one process"
        raise ValueError(f"--adapter converts a run's checkpoint by {DIRECTIONS[1]}, {what}")
    describe = _describe(args.source, args.model or "actor", args.target, args.model_files)
    count = adapter_of_run(args.source, args.target, args.model, args.model_files, describe)
    print(f"{args.target}: {count} adapter tensors")
    return True


def _options(args: argparse.Namespace) -> ConvertOptions:
    import torch

    from mrl.weights.convert.convert import ConvertOptions

    to_megatron = args.direction == DIRECTIONS[0]
    from_files = () if args.model_files else ("allow_pickle", "role")
    for name in ("model", "model_files", "shard_gb") if to_megatron else from_files:
        if getattr(args, name):
            raise ValueError(f"--{name.replace('_', '-')} has no effect on {args.direction} of {args.source}")
    return ConvertOptions(
        dtype=getattr(torch, args.dtype) if args.dtype else None,
        workers=args.workers or WORKERS,
        allow_pickle=args.allow_pickle,
        role=args.role,
        part=args.model,
        model_files=args.model_files,
        max_file_bytes=_file_bytes(args),
        describe=None if to_megatron else _describe(args.source, args.model or "actor", args.target, args.model_files),
    )


def _describe(source: Path, part: str, target: Path, model_files: Path | None) -> Describe | None:
    """Returns the writer of the card, and of the chat template and end tokens, of a run's checkpoint (step_N); None for
    other sources, which have no run.
    """
    from mrl.cards import WeightsOrigin, write_run_card
    from mrl.foreign import read_json
    from mrl.weights.disk.digest import file_digests
    from mrl.weights.disk.megatron_dirs import RUN_STATE
    from mrl.weights.disk.model_files import write_prompt_files

    if not (source / RUN_STATE).is_file():
        return None
    state = read_json(source / RUN_STATE)
    if "config" not in state:
        return None
    origin = WeightsOrigin(source.resolve().parents[1], state, state["step"], part)
    model = state["config"].get("model") or {}
    template, ends = model.get("chat_template"), state.get("end_tokens", {}).get("actor" if part == "ema" else part, ())
    base = model_files or Path((state["config"].get(part) or {}).get("path") or model["path"])
    if template is not None and not Path(template).is_file():
        missing = f"{template}, the chat template of the run, is missing: {target} has that of {base}"
        print(f"mrl: {missing}", file=sys.stderr)
        template = None

    def describe(export: Path, digests: dict[str, str]) -> None:
        write_prompt_files(export, base, template, ends, model.get("eos_token"))
        if note := write_run_card(origin, export, target, digests, file_digests(origin.base_files())):
            print(f"mrl: {note}", file=sys.stderr)

    return describe


def _summary(report: ConvertReport, target: Path) -> str:
    from mrl.directories import size_text
    from mrl.weights.disk.draft_layers import draft_note

    rate = size_text(report.nbytes / max(report.seconds, 1e-9))
    line = f"{target}: {report.role}, {size_text(report.nbytes)} in {report.seconds:.1f} s ({rate}/s)"
    return f"{line}\n{target}: {note}" if (note := draft_note(report.model_files, target)) else line


def _verify(hf: Path, megatron: Path, args: argparse.Namespace, meshes: Meshes, *, as_json: bool) -> bool:
    from mrl.parallel import world_size
    from mrl.weights.compare.verdict import compare_models

    if world_size() > 1:
        raise ValueError(f"mrl verify runs in one process, not in {world_size()}: start it without torchrun")
    verdict = compare_models(
        hf,
        megatron,
        meshes,
        part=args.model,
        model_files=args.model_files,
        role=args.role,
        allow_pickle=args.allow_pickle,
        skip_logits=args.skip_logits,
    )
    if as_json:
        print(json.dumps(verdict.as_dict(), indent=1))
    else:
        verdict.show()
    return verdict.same
