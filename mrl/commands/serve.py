"""`mrl serve`: runs the engines of a node without trainer ranks."""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from mrl.commands import shared, world
from mrl.commands.train import COMPILED

if TYPE_CHECKING:
    from mrl.config.schema import RLConfig

EXIT_AWAY = 69  # EX_UNAVAILABLE: there was no run to serve


def add(commands: Any) -> None:
    """Adds the subcommand and its arguments."""
    parser = commands.add_parser("serve", help="run the engines of a node that has no trainer ranks")
    shared.add_config(parser, "rollout.servers=2")
    parser.add_argument("--node", type=int, default=0, metavar="K", help="number of this engine node, from 0")
    parser.add_argument(
        "--head",
        metavar="HOST[:PORT]",
        help="the trainer's first node: engines listen on this machine's address in the direction of that node "
        "(default: the address of the default route)",
    )
    parser.description = (
        "For a run with placement.mode: disaggregated. Starts rollout.servers engines here and registers this node "
        "with the sglang-router that `mrl train` with the same configuration starts. Exit codes: 0, the run has ended; "
        "69, no run was active for placement.away_s seconds; 75, asked to stop by SIGUSR1; 128 + N, ended by "
        "signal N; 2, the configuration is wrong; 1, another error, such as a --node that is already in use."
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Serves engines and returns the exit code."""
    from mrl.config.checks.rollout import check_node
    from mrl.config.loader import load

    os.environ.setdefault(*COMPILED)
    if args.node < 0:
        raise shared.UsageError(f"--node {args.node}: nodes are numbered from 0")
    # checked for the trainer's world, which runs elsewhere
    cfg = load(args.config, args.overrides, planned=lambda cfg: replace(shared.whole_world(cfg), planned=True))
    if cfg.engine_nodes() is None:
        raise shared.UsageError("mrl serve needs placement.mode: disaggregated")
    rl, gpus = cast("RLConfig", cfg), world.gpus()
    if problems := [f"{', '.join(problem.keys)}: {problem.message}" for problem in check_node(rl, gpus)]:
        raise shared.UsageError("\nmrl: ".join(problems))
    return _serve(rl, args, gpus)


def _serve(cfg: RLConfig, args: argparse.Namespace, gpus: int) -> int:
    from mrl.config.derived import Machine
    from mrl.inference.agent import Home
    from mrl.inference.errors import EngineStartError, EngineUnavailable
    from mrl.inference.membership import engines_folder
    from mrl.inference.serve import EngineNode, Reason
    from mrl.launcher import signals
    from mrl.observe.lock import Lock, RunLocked
    from mrl.ports import NoFreePort, address_towards, default_address
    from mrl.redaction import redact
    from mrl.resilience.protocol import EXIT_PREEMPTED

    def say(line: str) -> None:
        print(f"mrl: engine node {args.node}: {redact(line)}", file=sys.stderr, flush=True)

    run_dir = (Path(cfg.run.root) / cfg.run.name).absolute()
    with signals.collect_signals() as received, contextlib.ExitStack() as stack:
        try:
            host = address_towards(args.head.partition(":")[0]) if args.head else default_address()
            stack.callback(Lock(engines_folder(run_dir) / f"node_{args.node}.lock").release)
            node = EngineNode(cfg, run_dir, Home(args.node, host), Machine(1, 0, gpus), received, say)
            with contextlib.closing(node):
                reason = node.serve()
        except RunLocked:
            say(f"another mrl serve is already node {args.node} of {run_dir}: choose another --node, or stop that one")
            return 1
        except (EngineStartError, EngineUnavailable, NoFreePort, OSError, ValueError) as error:
            say(str(error))
            return 1
    if not isinstance(reason, Reason):
        say(f"ends: signal {reason}")
        return 128 + reason
    say(f"ends: {reason}")
    return {Reason.RUN_IS_OVER: 0, Reason.PREEMPTED: EXIT_PREEMPTED, Reason.NO_RUN: EXIT_AWAY}[reason]
