"""`mrl eval CONFIG|RUN_DIR`: evaluates a model on held-out rows, with JSON, a table and a page."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mrl import strict_json
from mrl.commands.shared import CONFIG_ERROR, load_read_only, require_language_model
from mrl.files import write_atomically

if TYPE_CHECKING:
    from mrl.config.schema import Config


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments for held-out rows."""
    parser.add_argument("--rows", type=int, metavar="N", help="use the first N rows or documents (default: all)")
    parser.add_argument("--per-prompt", type=int, default=1, metavar="N", help="responses per prompt (default: 1)")
    parser.add_argument("--temperature", type=float, metavar="T", help="default: 0 for one response per prompt, else 1")
    parser.add_argument("--right-from", type=float, default=1.0, metavar="X", help="lowest correct score (default: 1)")
    parser.add_argument("--lm-eval", metavar="TASK,TASK", help="tasks of lm-evaluation-harness, in place of rows")
    parser.add_argument("--lm-eval-path", type=Path, metavar="DIR", help="task files of your own, for --lm-eval")
    parser.add_argument("--out", type=Path, metavar="DIR", help="directory for eval.json and eval.html (RUN_DIR)")


def run(args: argparse.Namespace) -> int:
    """Prints the table, writes OUT/eval.json and eval.html.

    Returns 2 for a wrong configuration or argument, 1 for unusable rows, weights or engine.
    """
    from mrl.config.problems import ConfigError

    if problem := _wrong(args):
        print(f"mrl: {problem}", file=sys.stderr)
        return CONFIG_ERROR
    try:
        loaded = load_read_only(args.config, args.overrides)
    except ConfigError as error:
        print(error, file=sys.stderr)
        return CONFIG_ERROR
    if (cfg := require_language_model(loaded, "mrl eval")) is None:
        return CONFIG_ERROR
    if cfg.data.validation is None and not args.lm_eval:
        print("mrl: data.validation is not set: name the held-out rows to evaluate on", file=sys.stderr)
        return CONFIG_ERROR
    run_dir = Path(cfg.run.root) / cfg.run.name
    weights = args.weights or (run_dir / "hf" if (run_dir / "hf").is_dir() else Path(cfg.model.path))
    found = _found(args, cfg, str(weights), run_dir)
    if isinstance(found, str):
        print(f"mrl: {found}", file=sys.stderr)
        return 1
    rows = args.lm_eval or ", ".join(source.path for source in cfg.data.validation or ())
    return _written(args.out or run_dir, {"weights": str(weights), "data": rows, **found})


def _wrong(args: argparse.Namespace) -> str | None:
    if os.environ.get("WORLD_SIZE", "1") != "1":
        return f"WORLD_SIZE={os.environ['WORLD_SIZE']}: mrl eval runs in one process: start it without torchrun"
    if args.per_prompt < 1 or (args.rows is not None and args.rows < 1):
        return "--rows and --per-prompt must be at least 1"
    if args.lm_eval and (args.per_prompt != 1 or args.temperature is not None):
        return "--per-prompt and --temperature have no effect: with --lm-eval the tasks define how answers are sampled"
    if args.lm_eval_path is not None and not (args.lm_eval and args.lm_eval_path.is_dir()):
        return f"--lm-eval-path {args.lm_eval_path}: must be a directory, beside --lm-eval"
    if args.temperature is not None and args.temperature < 0:
        return f"--temperature {args.temperature:g}: must be at least 0"
    return None


def _found(args: argparse.Namespace, cfg: Config, weights: str, run_dir: Path) -> dict[str, Any] | str:
    """Returns the measurements, or the problem as text."""
    from mrl.config.schema import RewardModelTrainerConfig
    from mrl.data import DataError, TokenizerError
    from mrl.evaluation.agreement import reward_model_agreement
    from mrl.evaluation.answers import evaluate_answers, why_unanswerable
    from mrl.evaluation.held_out import held_out
    from mrl.evaluation.lm_harness import lm_eval_scores
    from mrl.inference import EngineError, EngineStartError, RolloutError
    from mrl.inference.errors import EngineUnavailable
    from mrl.reward.errors import RewardError
    from mrl.weights.errors import WeightError

    temperature = args.temperature if args.temperature is not None else float(args.per_prompt > 1)
    try:
        if args.lm_eval:
            return lm_eval_scores(cfg, weights, args.lm_eval.split(","), args.lm_eval_path, args.rows)
        if (of := cfg.imitated()) is not None:
            return {"metrics": held_out(cfg, of, weights, args.rows)}
        if isinstance(cfg, RewardModelTrainerConfig):
            return reward_model_agreement(cfg, weights, args.rows)
        if not cfg.is_sampling:
            return f"trainer {cfg.trainer} has nothing to evaluate: no target responses, no reward and no reward model"
        if (why := why_unanswerable(cfg, weights)) is not None:
            return why
        logs = (args.out or run_dir) / "eval_logs"
        logs.mkdir(parents=True, exist_ok=True)
        rows = args.rows or sys.maxsize
        return evaluate_answers(cfg, weights, logs, rows, args.per_prompt, temperature, args.right_from)
    except (EngineError, EngineStartError, EngineUnavailable, RolloutError) as error:
        return str(error)
    except (DataError, TokenizerError, RewardError, WeightError) as error:
        return str(error)
    except OSError as error:
        return str(error) if error.filename is None else f"{error.filename}: {error.strerror or error}"
    except ValueError as error:
        return str(error)


def _written(out: Path, found: dict[str, Any]) -> int:
    from mrl.evaluation.show import lines, page

    print(f"weights  {found['weights']}\ndata     {found['data']}\n")
    print("\n".join(lines(found)))
    try:
        out.mkdir(parents=True, exist_ok=True)
        write_atomically(out / "eval.json", strict_json.dumps(strict_json.finite(found), indent=1) + "\n")
        write_atomically(out / "eval.html", page(found))
    except OSError as error:
        print(f"mrl: {out} cannot be written: {error.strerror or error}", file=sys.stderr)
        return 1
    print(f"\nresults  {out / 'eval.json'}, {out / 'eval.html'}")
    return 0
