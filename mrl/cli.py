"""The `mrl` command. Each subcommand imports what it needs when it runs."""

from __future__ import annotations

import argparse
import os
import re
import signal
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mrl import __version__, failure
from mrl.weights import command

if TYPE_CHECKING:
    from mrl.config.derived import Machine
    from mrl.config.schema import Config
    from mrl.launcher import Nursery

CONFIG_ERROR = 2
# Of ranks and engines. Torch's own place is in /tmp, by a name that anybody can take first; what is there is run.
COMPILED = ("TORCHINDUCTOR_CACHE_DIR", os.path.expanduser("~/.cache/mrl/torchinductor"))


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one subcommand; returns the exit code. argv: None in a process that is here for nothing else."""
    try:
        return _run(sys.argv[1:] if argv is None else argv, is_program=argv is None)
    except KeyboardInterrupt:
        print("mrl: stopped by Ctrl-C", file=sys.stderr)
        return 128 + signal.SIGINT


def _run(argv: Sequence[str], is_program: bool) -> int:
    for word in argv:
        if re.search("[\ud800-\udfff]", word):
            print(f"mrl: an argument is not UTF-8: {os.fsencode(word)!r}", file=sys.stderr)
            return CONFIG_ERROR
    args = _parser().parse_args(argv)
    if args.command == "train":
        return train(args.config, args.overrides, may_be_copied=is_program)
    if args.command == "data":
        return data(args.config, args.overrides, args.samples)
    if args.command == "config":
        return config_manual(args.key, args.markdown)
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

    data_parser = commands.add_parser("data", help="show what a configuration's data looks like to the model")
    data_parser.add_argument("config", type=Path, metavar="CONFIG", help="YAML file")
    data_parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="such as data.chat_template=true")
    data_parser.add_argument("--samples", type=int, default=3, metavar="N", help="prompts to show (default: 3)")
    data_parser.description = (
        "Reads and tokenises all sources as the run would, and shows what is left out or cut, the lengths in tokens, "
        "and the run's first prompts after the chat template."
    )

    config_parser = commands.add_parser("config", help="show what a configuration can hold, with defaults and meaning")
    what = config_parser.add_mutually_exclusive_group()
    what.add_argument("key", nargs="?", metavar="SECTION|KEY", help="such as rollout or actor.optimizer.lr")
    what.add_argument("--markdown", action="store_true", help="all sections and keys, as docs/configuration.md")

    report_parser = commands.add_parser("report", help="write a run's report: one HTML page and the reward curve")
    report_parser.add_argument("run_dir", type=Path, metavar="RUN_DIR")

    command.add_parsers(commands)
    commands.add_parser("doctor", help="what is installed here, what it is used for, what happens without it")
    return parser


def train(config: Path, overrides: Sequence[str], may_be_copied: bool) -> int:
    """Loads and checks the configuration, then is a rank of the world around it, or starts one, whose ranks may be
    copies of this process as it is now."""
    os.environ.setdefault(*COMPILED)
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        from mrl.resilience import preemption, rank

        preemption.die_at_once()
        rank.adopt()
        cfg = _load(config, overrides, joined=_joined())
        return cfg if isinstance(cfg, int) else _be_a_rank(cfg)

    cfg = _load(config, overrides)  # most mistakes are found here, before torch has been imported to count GPUs
    if isinstance(cfg, int):
        return cfg
    if cfg.run.launcher != "mrl" or not may_be_copied:
        return _lead(config, overrides, None)
    from mrl.launcher import Nursery

    with Nursery() as nursery:  # imports while the rest is checked
        return _lead(config, overrides, nursery)


def _load(config: Path, overrides: Sequence[str], **machine: Any) -> Config | int:
    """The configuration, or the exit code of one that cannot be used."""
    from mrl.config.loader import ConfigError, load

    try:
        cfg = load(config, overrides, **machine)
        _check_temporary_files()
    except ConfigError as error:
        if os.environ.get("LOCAL_RANK", "0") == "0":
            print(error, file=sys.stderr)
        return CONFIG_ERROR
    except OSError as error:
        print(f"mrl: {error}", file=sys.stderr)
        return 1
    return cfg


def _lead(config: Path, overrides: Sequence[str], nursery: Nursery | None) -> int:
    cfg = _load(config, overrides, gpus=_gpus())
    if isinstance(cfg, int):
        return cfg
    return 1 if _is_refused(cfg) or _lacks_layers(cfg) else _start_world(cfg, config, overrides, nursery)


def data(config: Path, overrides: Sequence[str], samples: int) -> int:
    """Shows the data of a configuration. Exit code 1: it cannot be used."""
    from mrl.config.loader import ConfigError, load
    from mrl.data import DataError, TokenizerError
    from mrl.data.preview import preview
    from mrl.preflight import check_of_sampled

    try:
        cfg = load(config, overrides)
    except ConfigError as error:
        print(error, file=sys.stderr)
        return CONFIG_ERROR
    if _is_refused(cfg):
        return 1
    try:
        for line in preview(cfg, samples, check_of_sampled(cfg)):
            print(line)
    except (DataError, TokenizerError) as error:
        print(error, file=sys.stderr)
        return 1
    return 0


def _is_refused(cfg: Config) -> bool:
    """Says what is wrong with the data and the rewards, as far as it shows without a world."""
    from mrl import preflight
    from mrl.data import DataError, TokenizerError
    from mrl.reward import RewardError
    from mrl.user_functions import FunctionError

    try:
        preflight.check(cfg)
    except (DataError, TokenizerError, RewardError, FunctionError) as error:
        print(error, file=sys.stderr)
        return True
    return False


def _lacks_layers(cfg: Config) -> bool:
    """Says why, if models are to be made of transformer-engine's layers and cannot be."""
    from mrl import platform
    from mrl.config.derived import asks_for_transformer_engine

    asked = asks_for_transformer_engine(cfg)
    problem = platform.transformer_engine_problem() if asked else None
    if problem is not None:
        print(f"mrl: {', '.join(asked)}: transformer_engine cannot be used here: {problem}", file=sys.stderr)
    return problem is not None


def config_manual(key: str | None, as_markdown: bool) -> int:
    """Shows what a section or key is; of none, which sections there are."""
    from mrl.config import manual

    try:
        print(manual.markdown() if as_markdown else manual.text(key), end="" if as_markdown else "\n")
    except manual.UnknownKey as error:
        print(f"mrl: {error}", file=sys.stderr)
        return CONFIG_ERROR
    return 0


def report(run_dir: Path) -> int:
    """Writes the report and prints answers before and after. Exit code 1: there is no run, or a file of it is
    broken."""
    if not run_dir.is_dir() or not any((run_dir / name).exists() for name in ("config.yaml", "metrics.jsonl")):
        what = "holds no run" if run_dir.is_dir() else "is no directory"
        print(f"{run_dir} {what}: expected a run directory, such as runs/NAME", file=sys.stderr)
        return 1
    from mrl.observe import Unreadable, before_after_table, write_report

    try:
        page = write_report(run_dir)
        before_after_table(run_dir)
    except (Unreadable, OSError) as error:
        print(f"mrl: {error}", file=sys.stderr)
        return 1
    print(f"run      {run_dir}")
    print(f"report   {page}")
    if (picture := run_dir / "reward_curve.png").exists():  # once there is something to draw
        print(f"picture  {picture}")
    return 0


def doctor() -> int:
    """Prints what is installed and what works here. Always exit code 0."""
    from rich.console import Console

    from mrl.platform import Feature, doctor_table
    from mrl.reward import sandbox

    (version, problem), unbound = sandbox.found(), sandbox.groups.problem()
    without = "such rewards are refused, unless reward.code.isolation is none"
    row = Feature("bubblewrap", version, "reward code: shuts in the programs that a model wrote", without, problem)
    bound = "reward code: the kernel's own bound on a program's memory and processes"
    group = Feature("control groups", "found", bound, "limits of each process, not of the kernel's buffers", unbound)
    Console().print(doctor_table([row, group]))
    return 0


def _check_temporary_files() -> None:
    """Raises OSError where none can be made: engines, torch and the sandbox make some."""
    wanted = os.environ.get("TMPDIR") or tempfile.gettempdir()
    if not os.path.isdir(wanted) or not os.access(wanted, os.W_OK | os.X_OK):
        raise OSError(f"TMPDIR is {wanted!r}, where no files can be made: name a directory that is there and writable")


def _gpus() -> int:
    from mrl.platform import gpu_count

    return gpu_count()


def _joined() -> Machine:
    from mrl.config.derived import Machine

    world_size = int(os.environ["WORLD_SIZE"])
    return Machine(world_size, int(os.environ.get("LOCAL_WORLD_SIZE", world_size)), _gpus(), joined=True)


def _start_world(cfg: Config, config: Path, overrides: Sequence[str], nursery: Nursery | None) -> int:
    from mrl.config.derived import Machine, is_on_one_machine
    from mrl.launcher import Elastic, LaunchError, launch, launch_elastic
    from mrl.observe import RunExists, refuse_existing, trackers
    from mrl.ports import GLOO, LOOPBACK
    from mrl.resilience import ft_config

    arguments = ["mrl", "train", str(config), *overrides]
    nproc, run_dir = Machine.starting(cfg).world_size, Path(cfg.run.root) / cfg.run.name
    save_s = cfg.resilience.save_deadline_s if cfg.checkpoint.every_steps else None
    timeouts = cfg.resilience.timeouts_s
    try:
        trackers.wanted(cfg.run)
        os.environ.update(LOOPBACK if is_on_one_machine(cfg) else {GLOO: LOOPBACK[GLOO]})
        if not (run_dir / "lock").exists():  # else rank 0 looks, who knows whether the run there is going on
            refuse_existing(cfg)
        if cfg.run.launcher == "mrl":
            command = [sys.executable, "-m", *arguments]
            return launch(command, nproc, run_dir / "logs", save_s=save_s, nursery=nursery)
        is_ft = cfg.run.launcher == "ft"
        job = Elastic(
            cfg.run.launcher,
            arguments,
            nproc,
            max_restarts=cfg.run.max_restarts if is_ft else 0,
            save_s=save_s,
            limits=timeouts.model_dump() if is_ft else {},
            ft_config=ft_config.write(run_dir, timeouts) if is_ft else None,
        )
        return launch_elastic(job, run_dir)
    except (LaunchError, RunExists, trackers.TrackerMissing, OSError) as error:
        print(f"mrl: {error}", file=sys.stderr)
        return 1


def _be_a_rank(cfg: Config) -> int:
    """Trains. The stopping signals become SystemExit, so that everything that is open gets closed; where checkpoints
    are written, SIGTERM and SIGUSR1 let the run save first."""
    from mrl.config.derived import summary
    from mrl.config.trainers.table import trainer_of
    from mrl.resilience import preemption

    if cfg.checkpoint.every_steps:
        preemption.save_first(cfg.resilience.save_deadline_s)
    if os.environ["RANK"] == "0":
        for name, value in summary(cfg, int(os.environ["WORLD_SIZE"])):
            print(f"{name:>8}  {value}")
    try:
        train = trainer_of(cfg).load_main()
        preemption.close_first()
        train(cfg)
    except Exception as error:
        if not failure.note(error):
            raise
        return 1
    return 0
