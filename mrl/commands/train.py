"""`mrl train`: checks first, then starts the processes."""

from __future__ import annotations

import argparse
import contextlib
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from mrl.commands import plan, shared, world
from mrl.config.problems import ConfigError
from mrl.imports import importing
from mrl.ports import is_a_rank, world_problem

if TYPE_CHECKING:
    from mrl.config.schema import AnyConfig
    from mrl.launcher import RankForkServer

# For ranks and engines. Torch's default is in /tmp under a name that anybody can take first, and its content is run.
COMPILED = ("TORCHINDUCTOR_CACHE_DIR", os.path.expanduser("~/.cache/mrl/torchinductor"))


# arguments of `run` for a world on this machine
ALONE = {"dry_run": False, "gpu": None, "nodes": 1, "node": None, "head": None}


def add(commands: Any) -> None:
    """Adds the subcommand and its arguments."""
    parser = commands.add_parser("train", help="train a model according to a configuration")
    shared.add_config(parser, "actor.optimizer.lr=1e-6")
    parser.add_argument(
        "--dry-run", action="store_true", help="build all ranks up to the first step, without allocating tensors"
    )
    parser.add_argument("--gpu", metavar="KIND", help="with --dry-run: plan for such GPUs (default: h100-80g)")
    parser.description = (
        "Checks the configuration, then starts the processes that its layout needs on this machine. "
        "Under torchrun or ft_launcher it becomes one of their ranks. "
        "With --nodes it starts the processes of one node: run the same command on every node."
    )
    shared.add_nodes(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Loads and checks the configuration, then becomes a rank of the surrounding world or starts a world.

    The ranks of a started world are forks of this process where possible.
    """
    shared.check_node_arguments(args)
    if args.gpu is not None and not args.dry_run:
        raise shared.UsageError("--gpu needs --dry-run")
    if args.nodes > 1 and args.dry_run:
        what = "builds all ranks of run.nodes machines here: leave out --nodes, --node and --head"
        raise shared.UsageError(f"--dry-run {what}")
    if args.dry_run:
        return plan.dry_run(args.config, args.overrides, args.gpu)
    os.environ.setdefault(*COMPILED)
    if is_a_rank():
        from mrl.config.loader import load
        from mrl.resilience import preemption, rank

        if problem := world_problem():
            raise shared.UsageError(problem)
        preemption.restore_default_signals()
        rank.set_up_process()
        around = world.joined_machine()
        try:
            cfg = load(args.config, args.overrides, joined=around)
        except ConfigError:
            if "0" in (os.environ["RANK"], os.environ.get("LOCAL_RANK", "0")):  # one rank of each node says why
                raise
            return shared.CONFIG_ERROR
        return 1 if shared.has_problems(cfg, around) else world.run_rank(cfg)
    return lead(args, ["mrl", "train", str(args.config), *args.overrides])


def lead(args: argparse.Namespace, rank: Sequence[str]) -> int:
    """Checks the configuration and starts its ranks here, each as `python -m RANK`; returns the exit code."""
    from mrl.config.loader import load
    from mrl.launcher import signals

    if args.is_program:
        signals.record_interrupts()
    # most mistakes are found here, before torch has been imported to count GPUs
    cfg = load(args.config, args.overrides, planned=world.machine_on_nodes(args.nodes))
    if not args.is_program:
        return _start(args, rank, None)
    from mrl.launcher import RankForkServer

    for name in ("OMP_NUM_THREADS", "PYTORCH_NVML_BASED_CUDA_CHECK"):  # imports would start threads and CUDA
        os.environ.setdefault(name, "1")
    with importing():
        import mrl.preflight.checks  # noqa: F401
    with _engine_fork_server(cfg):  # forked with the imports so far; it imports the rest during the checks
        if cfg.run.launcher != "mrl" or args.nodes > 1:
            return _start(args, rank, None)
        with RankForkServer() as fork_server:
            return _start(args, rank, fork_server)


def _engine_fork_server(cfg: AnyConfig) -> contextlib.AbstractContextManager[object]:
    """Fork server for engines, if this machine starts engines on a CPU."""
    from mrl.config.engines import ENGINES

    engines = cfg.engines()
    if engines is None or engines[0].urls or cfg.engine_nodes() is not None:
        return contextlib.nullcontext()
    from mrl.inference import fork_server
    from mrl.platform import is_built_for_gpus

    name = engines[0].engine
    imports = ENGINES[name].cpu_imports
    if imports is None or is_built_for_gpus() or fork_server.is_there(name):
        return contextlib.nullcontext()
    return fork_server.EngineForkServer(name, imports)


def _start(args: argparse.Namespace, rank: Sequence[str], fork_server: RankForkServer | None) -> int:
    from mrl.config.loader import load
    from mrl.launcher import signals

    machine = world.machine_on_nodes(args.nodes, world.gpus())
    cfg = load(args.config, args.overrides, planned=machine)
    if shared.has_problems(cfg, machine(cfg)):
        return 1
    signals.raise_recorded_interrupt()  # a Ctrl-C during the import of torch, before there are other processes
    if args.nodes > 1:
        return world.start_node(cfg, args)
    return world.start_local(cfg, rank, fork_server)
