"""The `mrl` command. Each subcommand imports what it needs when it runs."""

from __future__ import annotations

import argparse
import os
import re
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from mrl import __version__, failure
from mrl.preflight import command as preflight
from mrl.weights import command

if TYPE_CHECKING:
    from mrl.config.derived import Machine
    from mrl.config.schema import Config

CONFIG_ERROR = 2
# Of ranks and engines. Torch's own place is in /tmp, by a name that anybody can take first; what is there is run.
COMPILED = ("TORCHINDUCTOR_CACHE_DIR", os.path.expanduser("~/.cache/mrl/torchinductor"))


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one subcommand; returns the exit code."""
    try:
        return _run(sys.argv[1:] if argv is None else argv)
    except KeyboardInterrupt:
        print("mrl: stopped by Ctrl-C", file=sys.stderr)
        return 128 + signal.SIGINT


def _run(argv: Sequence[str]) -> int:
    for word in argv:
        if re.search("[\ud800-\udfff]", word):
            print(f"mrl: an argument is not UTF-8: {os.fsencode(word)!r}", file=sys.stderr)
            return CONFIG_ERROR
    args = _parsed(argv)
    if args.command == "train":
        return train(args.config, args.overrides)
    if args.command == "preflight":
        return preflight.main(args, _gpus)
    if args.command == "profile":
        return profile(args.config, args.overrides, args.steps, args.ranks)
    if args.command == "data":
        return data(args.config, args.overrides, args.samples)
    if args.command == "config":
        return config_manual(args.key, args.markdown)
    if args.command == "report":
        return report(args.run_dir, args.follow, args.every_s)
    if args.command in ("convert", "verify"):
        return (command.convert if args.command == "convert" else command.verify)(args)
    return doctor()


def _parsed(argv: Sequence[str]) -> argparse.Namespace:
    """Overrides may stand after options too, which argparse does not take."""
    parser = _parser()
    args, rest = parser.parse_known_args(argv)
    if any(word.startswith("-") or not hasattr(args, "overrides") for word in rest):
        parser.parse_args(argv)
    if rest:
        args.overrides += rest
    return args


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

    preflight.add_parser(commands)

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
    report_parser.add_argument("--follow", action="store_true", help="write it again as the run goes on, until it ends")
    report_parser.add_argument("--every-s", type=float, default=10.0, metavar="S", help="with --follow (default: 10)")

    profile_parser = commands.add_parser("profile", help="train a few steps under torch's profiler")
    profile_parser.add_argument("config", type=Path, metavar="CONFIG", help="YAML file")
    profile_parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="such as run.nproc=4")
    profile_parser.add_argument("--steps", default="2", metavar="N,N", help="numbers of steps, from 1 (default: 2)")
    profile_parser.add_argument("--ranks", default="0", metavar="N,N", help="whose (default: 0)")
    profile_parser.description = (
        "Trains to the last of these steps as run NAME-profile, a run of its own. For each step and rank, its folder "
        "profile/ gets a trace and a table of the ten largest operations. A longer run: run.profile, see mrl config."
    )

    command.add_parsers(commands)
    commands.add_parser("doctor", help="what this machine can do, what it lacks, and the commands for that")
    return parser


def train(config: Path, overrides: Sequence[str]) -> int:
    """Loads and checks the configuration, then is a rank of the world around it, or starts one."""
    os.environ.setdefault(*COMPILED)
    in_a_world = "RANK" in os.environ and "WORLD_SIZE" in os.environ
    if in_a_world:
        from mrl.resilience import preemption, rank

        preemption.die_at_once()
        rank.adopt()
    from mrl.config.loader import ConfigError, load

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
    if preflight.is_refused(cfg, in_a_world):
        return 1
    return _be_a_rank(cfg) if in_a_world else _start_world(cfg, config, overrides)


def profile(config: Path, overrides: Sequence[str], steps: str, ranks: str) -> int:
    """Trains a run of its own under the profiler. Exit codes as `train`'s."""
    from mrl.config.loader import ConfigError, load

    try:
        name = load(config, overrides).run.name
        last = max(int(step) for step in steps.split(","))
    except ConfigError as error:
        print(error, file=sys.stderr)
        return CONFIG_ERROR
    except ValueError:
        print(f"mrl: --steps {steps}: expected numbers such as 2 or 2,3", file=sys.stderr)
        return CONFIG_ERROR
    own = [f"run.name={name}-profile", "run.existing=move_aside", f"run.steps={last}"]
    return train(config, [*overrides, *own, f"run.profile={{steps: [{steps}], ranks: [{ranks}]}}"])


def data(config: Path, overrides: Sequence[str], samples: int) -> int:
    """Shows the data of a configuration. Exit code 1: it cannot be used."""
    from mrl.config.loader import ConfigError, load
    from mrl.data import DataError, TokenizerError
    from mrl.data.preview import preview
    from mrl.preflight.finding import problems
    from mrl.preflight.inputs import check_of_sampled
    from mrl.preflight.look import OF_INPUTS, look

    try:
        cfg = load(config, overrides)
    except ConfigError as error:
        print(error, file=sys.stderr)
        return CONFIG_ERROR
    if wrong := problems(list(look(cfg, OF_INPUTS))):
        print("\n".join(map(str, wrong)), file=sys.stderr)
        return 1
    try:
        for line in preview(cfg, samples, check_of_sampled(cfg)):
            print(line)
    except (DataError, TokenizerError) as error:
        print(error, file=sys.stderr)
        return 1
    return 0


def config_manual(key: str | None, as_markdown: bool) -> int:
    """Shows what a section or key is; of none, which sections there are."""
    from mrl.config import manual

    try:
        print(manual.markdown() if as_markdown else manual.text(key), end="" if as_markdown else "\n")
    except manual.UnknownKey as error:
        print(f"mrl: {error}", file=sys.stderr)
        return CONFIG_ERROR
    return 0


def report(run_dir: Path, is_followed: bool = False, every_s: float = 10.0) -> int:
    """Writes the report and prints answers before and after; if it is followed, as long as the run goes on, or until
    Ctrl-C, which leaves the page as it is by then. Exit code 1: there is no run, or a file of it is
    broken."""
    if not run_dir.is_dir() or not any((run_dir / name).exists() for name in ("config.yaml", "metrics.jsonl")):
        what = "holds no run" if run_dir.is_dir() else "is no directory"
        print(f"{run_dir} {what}: expected a run directory, such as runs/NAME", file=sys.stderr)
        return 1
    from mrl.observe import Unreadable, before_after_table, follow, write_report

    try:
        if is_followed:
            print(f"mrl: {follow(run_dir, max(0.5, every_s), print)}")
        page = write_report(run_dir)
        before_after_table(run_dir)
    except KeyboardInterrupt:
        if not is_followed:
            raise
        page = write_report(run_dir)
    except (Unreadable, OSError) as error:
        print(f"mrl: {error}", file=sys.stderr)
        return 1
    print(f"run      {run_dir}")
    print(f"report   {page}")
    if (picture := run_dir / "reward_curve.png").exists():  # once there is something to draw
        print(f"picture  {picture}")
    return 0


def doctor() -> int:
    """Prints what this machine can do, and how to close each gap. Always exit code 0."""
    from importlib.util import find_spec

    if find_spec("torch") is None:
        from mrl.packages import pip_install

        print(f"torch is not installed, without which mrl does nothing: {pip_install('torch')}")
        return 0
    from mrl import doctor

    return doctor.main()


def _gpus() -> int:
    from mrl.platform import gpu_count

    return gpu_count()


def _joined() -> Machine:
    from mrl.config.derived import Machine

    world_size = int(os.environ["WORLD_SIZE"])
    return Machine(world_size, int(os.environ.get("LOCAL_WORLD_SIZE", world_size)), _gpus(), joined=True)


def _start_world(cfg: Config, config: Path, overrides: Sequence[str]) -> int:
    from mrl.config.derived import Machine, is_on_one_machine
    from mrl.launcher import Elastic, LaunchError, launch, launch_elastic
    from mrl.observe import RunExists, refuse_existing
    from mrl.ports import GLOO, LOOPBACK
    from mrl.resilience import ft_config

    arguments = ["mrl", "train", str(config), *overrides]
    nproc, run_dir = Machine.starting(cfg).world_size, Path(cfg.run.root) / cfg.run.name
    save_s = cfg.resilience.save_deadline_s if cfg.checkpoint.every_steps else None
    timeouts = cfg.resilience.timeouts_s
    try:
        os.environ.update(LOOPBACK if is_on_one_machine(cfg) else {GLOO: LOOPBACK[GLOO]})
        if not (run_dir / "lock").exists():  # else rank 0 looks, who knows whether the run there is going on
            refuse_existing(cfg)
        if cfg.run.launcher == "mrl":
            return launch([sys.executable, "-m", *arguments], nproc, run_dir / "logs", save_s=save_s)
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
    except (LaunchError, RunExists, OSError) as error:
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
