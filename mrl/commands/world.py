"""Starts the world of a checked configuration, or runs one of its ranks."""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from mrl import failure
from mrl.commands.shared import CommandError
from mrl.imports import importing

if TYPE_CHECKING:
    from mrl.config.derived import Machine
    from mrl.config.schema import AnyConfig
    from mrl.launcher import ElasticJob, RankForkServer
    from mrl.trainers.shared.callbacks import TrainerCallback


def gpus() -> int:
    """Returns the number of GPUs that this process sees."""
    with importing():
        from mrl.platform import gpu_count

    return gpu_count()


def joined_machine() -> Machine:
    """Returns the world in which a launcher started this process."""
    from mrl.config.derived import Machine

    return Machine.from_environment(gpus())


def machine_on_nodes(nodes: int, gpus: int | None = None) -> Callable[[AnyConfig], Machine]:
    """Returns a function from a configuration to its world on `nodes` nodes like this one, which is one of them."""
    from mrl.config.derived import Machine

    return lambda cfg: Machine.for_launch(cfg, gpus, nodes)


def start_local(cfg: AnyConfig, arguments: Sequence[str], fork_server: RankForkServer | None) -> int:
    """Runs a world on this machine, each rank as `python -m ARGUMENTS`; returns the exit code. fork_server: fork server
    of the own launcher's ranks."""
    from mrl.config.derived import Machine, is_on_one_machine
    from mrl.launcher import LaunchError, launch, launch_elastic, nsys_command
    from mrl.observe import RunExists, refuse_existing
    from mrl.ports import GLOO, LOOPBACK

    nproc, run_dir = Machine.for_launch(cfg).world_size, Path(cfg.run.root) / cfg.run.name
    try:
        os.environ.update(LOOPBACK if is_on_one_machine(cfg) else {GLOO: LOOPBACK[GLOO]})
        if not (run_dir / "lock").exists():  # otherwise rank 0 checks, since it knows whether that run is active
            refuse_existing(cfg)
        if cfg.run.launcher == "mrl":
            command, save_s = [sys.executable, "-m", *arguments], _save_s(cfg)
            logs, profile, wrapped = run_dir / "logs", cfg.run.profile, dict[int, list[str]]()
            if profile is not None and profile.tool == "nsys":
                wrapped = dict.fromkeys(profile.ranks, nsys_command(logs, on_gpu=gpus() > 0))
            code = launch(command, nproc, logs, save_s=save_s, fork_server=fork_server, wrapped=wrapped)
        else:
            code = launch_elastic(_elastic_job(cfg, arguments, nproc), run_dir)
        return _mark_if_preempted(code, run_dir)
    except (LaunchError, RunExists, OSError) as error:
        raise CommandError(str(error)) from error


def start_node(cfg: AnyConfig, args: argparse.Namespace) -> int:
    """Runs this node's part of a multi-node world; returns the exit code. args: the command's, with the node's
    place."""
    from mrl.config.derived import Machine
    from mrl.launcher import LaunchError, NodeRank, launch_node
    from mrl.observe import RunExists, refuse_existing

    node, run_dir = NodeRank(args.node, args.nodes, args.head), Path(cfg.run.root) / cfg.run.name
    try:
        if node.number == 0 and not (run_dir / "lock").exists():
            refuse_existing(cfg)
        nproc = Machine.for_launch(cfg, gpus(), node.count).local_world_size
        code = launch_node(_elastic_job(cfg, ["mrl", "train", str(args.config), *args.overrides], nproc), run_dir, node)
        return _mark_if_preempted(code, run_dir) if node.number == 0 else code
    except (LaunchError, RunExists, OSError) as error:
        raise CommandError(f"{node.label}: {error}") from error


def _save_s(cfg: AnyConfig) -> float | None:
    return cfg.resilience.save_deadline_s if cfg.effective_checkpoint.every_steps else None


def _elastic_job(cfg: AnyConfig, arguments: Sequence[str], nproc: int) -> ElasticJob:
    """Returns the job of ft_launcher where `run.launcher` is ft, else of torchrun."""
    from mrl.launcher import ElasticJob
    from mrl.resilience import ft_config

    if cfg.run.launcher != "ft":
        return ElasticJob("torchrun", arguments, nproc, 0, _save_s(cfg), {}, None)
    timeouts = cfg.resilience.timeouts_s
    file = ft_config.write(Path(cfg.run.root) / cfg.run.name, timeouts)
    return ElasticJob("ft", arguments, nproc, cfg.run.max_restarts, _save_s(cfg), timeouts.model_dump(), file)


def _mark_if_preempted(exit_code: int, run_dir: Path) -> int:
    """Returns the exit code; marks the run as one to resume if no rank has done so."""
    from mrl.resilience.protocol import EXIT_PREEMPTED, MARKER, mark_preempted

    if exit_code == EXIT_PREEMPTED and run_dir.is_dir() and not (run_dir / MARKER).exists():
        with contextlib.suppress(OSError):
            mark_preempted(run_dir, None)
    return exit_code


def run_rank(cfg: AnyConfig, callbacks: Sequence[TrainerCallback] = ()) -> int:
    """Trains as one rank; returns the exit code."""
    try:
        train(cfg, callbacks)
    except Exception as error:
        if not failure.note(error):
            raise
        return 1
    return 0


def train(cfg: AnyConfig, callbacks: Sequence[TrainerCallback]) -> None:
    """Trains to the end as one rank.

    Stopping signals become SystemExit, so that everything open is closed. If checkpoints are configured, SIGTERM and
    SIGUSR1 let the run save first.
    """
    from mrl.config.derived import summary
    from mrl.config.trainers.table import trainer_of
    from mrl.resilience import preemption

    if cfg.effective_checkpoint.every_steps:
        preemption.save_on_signal(cfg.resilience.save_deadline_s)
    if os.environ["RANK"] == "0":
        for name, value in summary(cfg, int(os.environ["WORLD_SIZE"])):
            print(f"{name:>8}  {value}")
    with importing():
        make_loop = trainer_of(cfg).load_loop()
    preemption.close_on_signal()
    with make_loop(cfg, callbacks) as loop:
        loop.fit()
