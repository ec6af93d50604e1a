"""`mrl eval CONFIG|RUN_DIR`: evaluates a model on held-out rows, with JSON, a table and a page."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mrl import strict_json
from mrl.commands import shared
from mrl.files import write_atomically

if TYPE_CHECKING:
    from mrl.config.schema import Config


SAMPLING = ("per_prompt", "temperature", "right_from")  # arguments for answers that an engine generates
ARGUMENTS = ("rows", *SAMPLING, "lm_eval", "lm_eval_path", "out")
RIGHT_FROM = 1.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments for held-out rows."""
    parser.add_argument("--rows", type=int, metavar="N", help="use the first N rows or documents (default: all)")
    parser.add_argument("--per-prompt", type=int, metavar="N", help="responses per prompt (default: 1)")
    parser.add_argument("--temperature", type=float, metavar="T", help="default: 0 for one response per prompt, else 1")
    parser.add_argument("--right-from", type=float, metavar="X", help="lowest correct score (default: 1)")
    parser.add_argument("--lm-eval", metavar="TASK,TASK", help="tasks of lm-evaluation-harness, in place of rows")
    parser.add_argument("--lm-eval-path", type=Path, metavar="DIR", help="task files of your own, for --lm-eval")
    parser.add_argument("--out", type=Path, metavar="DIR", help="directory for eval.json and eval.html (RUN_DIR)")


def run(args: argparse.Namespace) -> int:
    """Prints the table, writes OUT/eval.json and eval.html.

    Returns 2 for a wrong configuration or argument, 1 for unusable rows, weights or engine.
    """
    _check(args)
    cfg = shared.load_for_eval(args)
    if cfg.data.validation is None and not args.lm_eval:
        raise shared.UsageError("data.validation is not set: name the held-out rows to evaluate on")
    run_dir = Path(cfg.run.root) / cfg.run.name
    weights = args.weights or (run_dir / "hf" if (run_dir / "hf").is_dir() else Path(cfg.model.path))
    rows = args.lm_eval or ", ".join(source.path for source in cfg.data.validation or ())
    found = {"weights": str(weights), "data": rows, **_measurements(args, cfg, str(weights), run_dir)}
    _write(args.out or run_dir, found)
    return 0


def _check(args: argparse.Namespace) -> None:
    """Raises UsageError for an argument that cannot be used."""
    shared.require_one_process()
    if any(number is not None and number < 1 for number in (args.rows, args.per_prompt)):
        raise shared.UsageError("--rows and --per-prompt must be at least 1")
    if args.lm_eval:
        shared.refuse_given(args, SAMPLING, "has no effect: with --lm-eval the tasks define how answers are sampled")
    if args.temperature == 0 and (args.per_prompt or 1) > 1:
        what = "has no effect with --temperature 0, which gives the same response each time: leave one of them out"
        raise shared.UsageError(f"--per-prompt {args.per_prompt} {what}")
    if args.lm_eval_path is not None and not (args.lm_eval and args.lm_eval_path.is_dir()):
        raise shared.UsageError(f"--lm-eval-path {args.lm_eval_path}: must be a directory, beside --lm-eval")
    if args.temperature is not None and args.temperature < 0:
        raise shared.UsageError(f"--temperature {args.temperature:g}: must be at least 0")


def _measurements(args: argparse.Namespace, cfg: Config, weights: str, run_dir: Path) -> dict[str, Any]:
    """Returns the measurements. Raises CommandError if rows, weights or engine cannot be used."""
    from mrl.config.schema import RewardModelTrainerConfig
    from mrl.evaluation.agreement import reward_model_agreement
    from mrl.evaluation.answers import evaluate_answers, why_unanswerable
    from mrl.evaluation.held_out import held_out
    from mrl.evaluation.lm_harness import lm_eval_scores
    from mrl.inference.errors import EngineError, EngineStartError, EngineUnavailable, RolloutError
    from mrl.reward.errors import RewardError
    from mrl.weights.errors import WeightError

    per_prompt = args.per_prompt or 1
    temperature = args.temperature if args.temperature is not None else float(per_prompt > 1)
    right_from = RIGHT_FROM if args.right_from is None else args.right_from
    if not args.lm_eval and not cfg.is_sampling:
        shared.refuse_given(args, SAMPLING, f"has no effect: trainer {cfg.trainer} generates no answers")
    try:
        if args.lm_eval:
            return lm_eval_scores(cfg, weights, args.lm_eval.split(","), args.lm_eval_path, args.rows)
        if (of := cfg.imitated()) is not None:
            return {"metrics": held_out(cfg, of, weights, args.rows)}
        if isinstance(cfg, RewardModelTrainerConfig):
            return reward_model_agreement(cfg, weights, args.rows)
        if not cfg.is_sampling:
            what = "no target responses, no reward and no reward model"
            raise shared.CommandError(f"trainer {cfg.trainer} has nothing to evaluate: {what}")
        if (why := why_unanswerable(cfg, weights)) is not None:
            raise shared.CommandError(why)
        logs = (args.out or run_dir) / "eval_logs"
        logs.mkdir(parents=True, exist_ok=True)
        rows = args.rows or sys.maxsize
        return evaluate_answers(cfg, weights, logs, rows, per_prompt, temperature, right_from)
    except OSError as error:
        why = str(error) if error.filename is None else f"{error.filename}: {error.strerror or error}"
        raise shared.CommandError(why) from error
    except (EngineError, EngineStartError, EngineUnavailable, RolloutError) as error:
        raise shared.CommandError(str(error)) from error
    except (ValueError, RewardError, WeightError) as error:  # of the data, the tokenizer or a library
        raise shared.CommandError(str(error)) from error


def _write(out: Path, found: dict[str, Any]) -> None:
    from mrl.evaluation.show import lines, page

    print(f"weights  {found['weights']}\ndata     {found['data']}\n")
    print("\n".join(lines(found)))
    with shared.writing(out):
        out.mkdir(parents=True, exist_ok=True)
        write_atomically(out / "eval.json", strict_json.dumps(strict_json.finite(found), indent=1) + "\n")
        write_atomically(out / "eval.html", page(found))
    print(f"\nresults  {out / 'eval.json'}, {out / 'eval.html'}")
