"""The `mrl` command. Each subcommand imports what it needs when it runs."""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, NoReturn

from mrl import __version__, failure
from mrl.weights import command

if TYPE_CHECKING:
    from mrl.config.derived import Machine
    from mrl.config.schema import Config

CONFIG_ERROR = 2


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one subcommand; returns the exit code."""
    args = _parser().parse_args(argv)
    if args.command == "train":
        return train(args.config, args.overrides)
    if args.command == "report":
        return report(args.run_dir)
    if args.command in ("convert", "verify"):
        return (command.convert if args.command == "convert" else command.verify)(args)
    return doctor()


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="mrl", description="Reinforcement learning for language models on Megatron-Core."
    )
    parser.add_argument("--version", action="version", version=f"mrl {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    train_parser = commands.add_parser("train", help="train as a configuration says")
    train_parser.add_argument("config", type=Path, metavar="CONFIG", help="YAML file")
    train_parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="such as actor.optimizer.lr=1e-6")
    train_parser.description = (
        "Checks the configuration, then starts the processes that its layout needs on this machine. "
        "Under torchrun or ft_launcher it joins the world that they started."
    )

    report_parser = commands.add_parser("report", help="write a run's report: one HTML page and the reward curve")
    report_parser.add_argument("run_dir", type=Path, metavar="RUN_DIR")

    command.add_parsers(commands)
    commands.add_parser("doctor", help="what is installed here, what it is used for, what happens without it")
    return parser


def train(config: Path, overrides: Sequence[str]) -> int:
    """Loads and checks the configuration, then is a rank of the world around it, or starts one."""
    from mrl.config.loader import ConfigError, load

    in_a_world = "RANK" in os.environ and "WORLD_SIZE" in os.environ
    try:
        if in_a_world:
            cfg = load(config, overrides, joined=_joined())
        else:
            load(config, overrides)  # most mistakes are found here, before torch has been imported to count GPUs
            cfg = load(config, overrides, gpus=_gpus())
    except ConfigError as error:
        if os.environ.get("LOCAL_RANK", "0") == "0":
            print(error, file=sys.stderr)
        return CONFIG_ERROR
    return _be_a_rank(cfg) if in_a_world else _start_world(cfg, config, overrides)


def report(run_dir: Path) -> int:
    if not run_dir.is_dir():
        print(f"{run_dir} is no directory: expected a run directory, such as runs/NAME", file=sys.stderr)
        return 1
    from mrl.observe import before_after_table, write_report

    page = write_report(run_dir)
    before_after_table(run_dir)
    print(f"run      {run_dir}")
    print(f"report   {page}")
    print(f"picture  {run_dir / 'reward_curve.png'}")
    return 0


def doctor() -> int:
    from rich.console import Console

    from mrl.platform import doctor_table

    Console().print(doctor_table())
    return 0


def _gpus() -> int:
    from mrl.platform import gpu_count

    return gpu_count()


def _joined() -> Machine:
    from mrl.config.derived import Machine

    world_size = int(os.environ["WORLD_SIZE"])
    return Machine(world_size, int(os.environ.get("LOCAL_WORLD_SIZE", world_size)), _gpus(), joined=True)


def _start_world(cfg: Config, config: Path, overrides: Sequence[str]) -> int:
    from mrl.config.derived import Machine
    from mrl.launcher import LaunchError, launch

    command = [sys.executable, "-m", "mrl", "train", str(config), *overrides]
    log_dir = Path(cfg.run.root) / cfg.run.name / "logs"
    try:
        return launch(command, Machine.starting(cfg).world_size, log_dir)
    except LaunchError as error:
        print(error, file=sys.stderr)
        return 1


def _be_a_rank(cfg: Config) -> int:
    """Trains. SIGTERM becomes SystemExit, so that everything that is open gets closed; a second one is ignored."""
    from mrl.config.derived import summary
    from mrl.config.schema import RLConfig

    signal.signal(signal.SIGTERM, _leave)
    if os.environ["RANK"] == "0":
        for name, value in summary(cfg, int(os.environ["WORLD_SIZE"])):
            print(f"{name:>8}  {value}")
    try:
        if isinstance(cfg, RLConfig):
            from mrl.trainers import rl

            rl.main(cfg)
        else:
            from mrl.trainers import sft

            sft.main(cfg)
    except Exception as error:
        if not failure.note(error):
            raise
        return 1
    return 0


def _leave(number: int, frame: FrameType | None) -> NoReturn:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    raise SystemExit(128 + number)
