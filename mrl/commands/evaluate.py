"""`mrl eval`: evaluates a run's weights, during the run or after it."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from mrl.commands import evaluate_rows, shared
from mrl.files import write_atomically

SAMPLES = 64
OF_REPORT = ("samples", "recipes", "svg")  # arguments of the precision report alone


def add(commands: Any) -> None:
    """Adds the subcommand and its arguments."""
    parser = commands.add_parser(
        "eval", help="evaluate a run's weights on held-out rows, or the numerical effect of fp8 on them"
    )
    parser.add_argument("--precision-report", action="store_true", help="compare emulated fp8 recipes with float32")
    shared.add_config(parser, "run.name=mine")
    parser.add_argument("--weights", type=Path, metavar="DIR", help="the model (default: RUN_DIR/hf, else model.path)")
    evaluate_rows.add_arguments(parser)
    parser.add_argument("--samples", type=int, metavar="N", help=f"for the precision report (default: {SAMPLES})")
    parser.add_argument("--recipes", metavar="NAME,NAME", help="fp8 recipes, such as current,blockwise (default: all)")
    parser.add_argument("--svg", type=Path, metavar="FILE", help="chart (default: RUN_DIR/precision.svg)")
    parser.description = (
        "CONFIG may be a run directory. An sft run is evaluated by its likelihood of data.validation, as in training, "
        "in one process; a reward model by its accuracy and margin on the pairs of data.validation; a run that "
        "generates by its reward on responses of its engine to the prompts of data.validation. --lm-eval instead runs "
        "tasks of lm-evaluation-harness, with its transformers model in one process. --precision-report "
        "instead compares every fp8 recipe with float32, on this machine and in one process: log-probs and policy "
        "gradient of the run's last samples, or of an sft run's data, with fp8 in the layers, in the loss head, and in "
        "both. The weights are those in RUN_DIR/hf if that directory exists, else those of model.path."
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Prints the table and draws the picture. Returns 2 for a wrong configuration or argument, 1 without samples."""
    if not args.precision_report:
        shared.refuse_given(args, OF_REPORT, "goes with --precision-report only")
        return evaluate_rows.run(args)
    shared.refuse_given(args, evaluate_rows.ARGUMENTS, "does not go with --precision-report")
    from mrl.precision.measure import RECIPES

    count = SAMPLES if args.samples is None else args.samples
    recipes = args.recipes.split(",") if args.recipes else list(RECIPES)
    shared.require_one_process()
    if count < 1:
        raise shared.UsageError(f"--samples {count}: must be at least 1")
    if unknown := [name for name in recipes if name not in RECIPES]:
        raise shared.UsageError(f"--recipes {','.join(unknown)}: expected some of {', '.join(RECIPES)}")
    cfg = shared.load_for_eval(args)
    from mrl.data import DataError, TokenizerError
    from mrl.observe import UnreadableFile
    from mrl.precision import NoSamplesError, lines, measure, picture, samples_of

    run_dir = Path(cfg.run.root) / cfg.run.name
    own = run_dir / "hf"
    weights = str(args.weights or (own if own.is_dir() else cfg.model.path))
    try:
        samples = samples_of(cfg, weights, count)
    except (NoSamplesError, DataError, TokenizerError, UnreadableFile) as error:
        raise shared.CommandError(str(error)) from error
    found, tokens = samples.rollout.num_samples, samples.rollout.num_response_tokens
    print(f"weights  {weights}\nsamples  {samples.source}: {found}, {tokens} response tokens")
    rows = measure(cfg, weights, samples, recipes, lambda name: print(f"computing {name}", file=sys.stderr))
    print("\n".join(["", *lines(rows), ""]))
    file = args.svg or run_dir / "precision.svg"
    with shared.writing(file):
        file.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(file, picture(rows, f"{cfg.run.name}: fp8 recipes compared with float32, {tokens} tokens"))
    print(f"picture  {file}")
    return 0
