"""`mrl plan`: predicts a run's needs before it holds a GPU."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mrl.commands import shared
from mrl.files import write_atomically

if TYPE_CHECKING:
    from mrl.config.derived import Machine
    from mrl.config.schema import AnyConfig, Config
    from mrl.plan.chips import Assumptions, Cluster

DOES_NOT_FIT = 1
DATA_BYTES = 64 << 20  # largest data.train whose prompts a plan reads
DRIVER = Path("/proc/driver/nvidia")


def add(commands: Any) -> None:
    """Adds the subcommand and its arguments."""
    parser = commands.add_parser("plan", help="predict a run's memory, step time and placement, without a GPU")
    shared.add_config(parser, "actor.parallel.tensor=8")
    parser.add_argument(
        "--gpu", metavar="KIND", help="such as h100-80g, h200; none: CPUs (default: this machine, if the run fits)"
    )
    parser.add_argument("--gpus", type=int, metavar="N", help="total ranks (default: run.nodes x run.nproc)")
    parser.add_argument("--per-node", type=int, metavar="N", help="GPUs per node (default: run.nproc, or 8)")
    parser.add_argument("--json", action="store_true", help="print the whole plan as JSON")
    parser.add_argument("--svg", type=Path, metavar="FILE", help="also draw the placement of ranks")
    parser.add_argument("--search", action="store_true", help="list actor and critic layouts that fit, best first")
    parser.add_argument("--out", type=Path, metavar="FILE", help="with --search: write CONFIG with the best layout")
    parser.description = (
        "Computes memory per rank and phase, host memory, disk, batch sizes and step time, and runs nothing. Needs the "
        "model's config.json, but no weights. Uses the mean prompt length if prompts and tokenizer are on this "
        "machine. Exit code 1: the run does not fit."
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Prints the plan and returns the exit code."""
    from mrl.config.loader import load
    from mrl.config.schema import Config
    from mrl.config.trainers.table import trainer_of
    from mrl.plan import picture, text
    from mrl.plan.chips import KINDS, Cluster
    from mrl.plan.plan import machine_of, make_plan, read_shapes

    _check(args)
    asked = None if args.search else args.gpus  # a search may need another world size than the written layout
    cfg = load(args.config, args.overrides, planned=lambda cfg: machine_of(cfg, asked, args.per_node))
    machine = machine_of(cfg, args.gpus, args.per_node)
    ranks, per_node = machine.world_size, machine.local_world_size
    kind, why = (args.gpu, "") if args.gpu else _default_kind(cfg, machine, args.search or args.svg is not None)
    if ranks % per_node:
        raise shared.UsageError(f"{ranks} ranks are not a multiple of {per_node} per node (--per-node)")
    cluster = Cluster(KINDS[kind], ranks, per_node)
    if (make_own := trainer_of(cfg).load_plan()) is not None:
        if args.search or args.svg is not None:
            what = f"language models only, and this is trainer {cfg.trainer}: leave them out"
            raise shared.UsageError(f"--search and --svg plan {what}")
        own = make_own(cfg, cluster)
        print(json.dumps(own.data(), indent=2) if args.json else "\n".join(own.lines()))
        return DOES_NOT_FIT if own.problems else 0
    assert isinstance(cfg, Config)
    assumed, prompts = _assumptions(cfg)
    if args.search:
        return _search(args, cfg, cluster, assumed)
    plan = make_plan(cfg, cluster, read_shapes(cfg), assumed)
    if args.svg is not None:
        with shared.writing(args.svg):
            write_atomically(args.svg, picture.draw(plan.placement))
    if why and not args.json:
        print(f"planned for {kind}: {why} (--gpu KIND selects another)")
    if prompts and not args.json:
        print(prompts)
    print(json.dumps(text.data(plan), indent=2) if args.json else "\n".join(text.lines(plan)))
    return DOES_NOT_FIT if plan.problems else 0


def _default_kind(cfg: AnyConfig, machine: Machine, needs_gpus: bool) -> tuple[str, str]:
    """Returns (kind, reason): this machine's kind (its GPU, or "none" if the run fits into its memory), else the usual
    GPU."""
    import psutil

    from mrl.config.schema import Config
    from mrl.plan.chips import DEFAULT, NO_GPU, Assumptions, Cluster, chip_named
    from mrl.plan.plan import make_plan, read_shapes

    if name := next(map(_gpu_model, sorted(DRIVER.glob("gpus/*/information"))), ""):
        chip = chip_named(name)
        return (chip.name, "this machine's GPU") if chip else (DEFAULT, f"mrl does not know the limits of {name}")
    if needs_gpus or not isinstance(cfg, Config) or machine.local_world_size != machine.world_size:
        return DEFAULT, "there is no GPU here"
    cpus = Cluster(NO_GPU, machine.world_size, machine.local_world_size)
    needed = make_plan(cfg, cpus, read_shapes(cfg), Assumptions())
    here = psutil.virtual_memory().total
    if not needed.problems and needed.host_of_node < here:
        return NO_GPU.name, "this machine has no GPU"
    return DEFAULT, f"this machine has no GPU, and the run does not fit into its {here / 2**30:.0f} GiB of memory"


def _assumptions(cfg: Config) -> tuple[Assumptions, str]:
    """Returns the plan's assumptions and a line about them.

    The mean prompt length is the run's own if its prompts and the tokenizer are on this machine.
    """
    from mrl.families import engine_arch
    from mrl.plan.chips import Assumptions

    limit, use = cfg.step_size().prompt_tokens, cfg.data_uses().get("data")
    if limit is None or use is None or not use.is_sampled or engine_arch(cfg.model.path).vision is not None:
        return Assumptions(), ""
    files = [Path(source.path) for source in use.cfg.train]
    if not all(file.is_file() for file in files) or sum(file.stat().st_size for file in files) > DATA_BYTES:
        return Assumptions(), ""
    from mrl.data import DataError, PromptDataset, TokenizerError, load_tokenizer

    try:
        tokenizer = load_tokenizer(cfg.model.path, cfg.model.eos_token, cfg.model.chat_template)
        prompts = PromptDataset(use.cfg.train, use.cfg, tokenizer).first(None)
    except (DataError, TokenizerError, OSError):  # `mrl data` reports the problem
        return Assumptions(), ""
    lengths = [len(prompt.token_ids) for prompt in prompts]
    mean = sum(lengths) / len(lengths)
    line = f"prompts of data.train: mean {mean:.0f} tokens, longest {max(lengths)}"
    return Assumptions(mean_prompt_share=mean / limit, measured=("mean_prompt_share",)), line


def _gpu_model(information: Path) -> str:
    """Returns a GPU's name from its driver, without importing torch, since a plan takes a second."""
    lines = dict(line.split(":", 1) for line in information.read_text().splitlines() if ":" in line)
    return lines.get("Model", "").strip()


def dry_run(config: Path, overrides: Sequence[str], gpu: str | None) -> int:
    """`mrl train --dry-run [--gpu KIND]`: needs only config.json and names missing files. Returns 1 if the run would
    fail."""
    from mrl.config.loader import load
    from mrl.config.schema import Config
    from mrl.config.trainers.table import trainer_of
    from mrl.plan.chips import DEFAULT, KINDS, Assumptions, Cluster
    from mrl.plan.plan import machine_of, make_plan, read_shapes

    shared.check_gpu_kind(gpu)
    cfg = load(config, overrides, planned=machine_of)
    machine = machine_of(cfg)
    cluster = Cluster(KINDS[gpu or DEFAULT], machine.world_size, machine.local_world_size)
    from mrl.plan.dry_run import DryRun, missing_files

    if (own := trainer_of(cfg).load_plan()) is not None:
        missing, plan = missing_files(cfg), own(cfg, cluster)
        print("\n".join(missing or ["all files that the configuration names are present on this machine"]) + "\n")
        print("\n".join(plan.lines()))
        return DOES_NOT_FIT if plan.problems or (not missing and shared.has_problems(cfg, machine)) else 0

    assert isinstance(cfg, Config)
    run = DryRun(make_plan(cfg, cluster, read_shapes(cfg), Assumptions()))
    for line in run.lines():
        print(line)
    is_refused = not run.missing_files and shared.has_problems(cfg, machine)  # checks local data and rewards
    return DOES_NOT_FIT if run.problems or is_refused else 0


def _search(args: argparse.Namespace, cfg: Config, cluster: Cluster, assumed: Assumptions) -> int:
    from mrl.config.tree import read_overrides
    from mrl.plan import search
    from mrl.plan.plan import read_shapes

    result = search.search(cfg, cluster, read_shapes(cfg), assumed)
    found = result.fitting
    if found and args.out is not None:
        best = search.best_configuration(found, args.config, read_overrides(args.overrides), args.out)
        with shared.writing(args.out):
            write_atomically(args.out, best)
    print("\n".join(search.lines(result)))
    if found and args.out is not None:
        print(f"written  {args.out}")
    return 0 if found else DOES_NOT_FIT


def _check(args: argparse.Namespace) -> None:
    """Raises UsageError for arguments that do not go together."""
    shared.check_gpu_kind(args.gpu)
    if any(number is not None and number < 1 for number in (args.per_node, args.gpus)):
        raise shared.UsageError("--gpus and --per-node must be at least 1")
    if args.search and args.gpu == "none":
        what = "compares step times, which are predicted for GPUs only: name a GPU with --gpu KIND"
        raise shared.UsageError(f"--search {what}")
    if args.search and (args.json or args.svg is not None):
        raise shared.UsageError("--json and --svg do not go with --search: leave them out")
    if args.out is not None and not args.search:
        raise shared.UsageError("--out needs --search")
    if args.out is not None and args.out.resolve() == args.config.resolve():
        raise shared.UsageError("--out would overwrite CONFIG, on which it is based: name another file")
