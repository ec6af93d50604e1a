"""`mrl eval reward`: a reward model's scores of ranked pairs or lists, such as RewardBench."""

from __future__ import annotations

import argparse
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mrl import strict_json
from mrl.commands import shared
from mrl.files import write_atomically

if TYPE_CHECKING:
    from mrl.data import PreferenceDataset
    from mrl.scoring.accuracy import AccuracyReport, ScoredRow

NAME = "eval reward"
COMPARED_ROWS, MOST_DIFFERENCE = 32, 1e-3


def add(commands: Any) -> None:
    """Adds the subcommand and its arguments."""
    parser = commands.add_parser(NAME, help="accuracy of a reward model by subset (as RewardBench) and length")
    parser.add_argument("model", type=Path, metavar="DIR", help="a ...ForSequenceClassification, such as RUN_DIR/hf")
    parser.add_argument("data", type=Path, metavar="DATA", help="rows with prompt, chosen and rejected")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the report and the score of every row")
    parser.add_argument("--at-least", type=float, metavar="X", help="exit with 1 if the accuracy is lower")
    parser.add_argument("--compare", action="store_true", help=f"compare {COMPARED_ROWS} scores with transformers'")
    parser.add_argument("--subset-key", default="subset", metavar="KEY", help="column to group by (default: subset)")
    parser.add_argument("--no-chat-template", action="store_true", help="do not apply the model's chat template")
    parser.add_argument("--max-tokens", type=int, metavar="N", help="leave out longer rows (default: model limit)")
    parser.add_argument("--tokens-at-once", type=int, default=8192, metavar="N", help="limit of a forward pass (8192)")
    parser.description = (
        "A row is correct if the chosen response has the strictly highest score. `rejected` may be a list, as in "
        "RewardBench 2, and `chosen` a list of one; ranked lists are accepted too. If all subsets of a RewardBench "
        "section are present, its weighted accuracy is shown. Runs offline, in one process."
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Prints the table. Returns 2 for a wrong argument or a model that scores no texts.

    Returns 1 for unusable rows, an accuracy below --at-least, or scores that differ from transformers'.
    """
    _check(args)
    from mrl.data import DataError, TokenizerError, preference_notes
    from mrl.scoring.accuracy import lines, report
    from mrl.scoring.measure import read, score_rows
    from mrl.weights.errors import WeightError

    try:
        chat = False if args.no_chat_template else None
        data = read(str(args.model), str(args.data), args.subset_key, chat, args.max_tokens)
        for line in preference_notes(str(args.data), data):
            print(line)
        if chat is None and any(source.as_text for source in data.sources):
            print("If the rows are whole prompts, with a chat template applied already: --no-chat-template")
        judged = score_rows(str(args.model), data, args.tokens_at_once, _progress)
    except (DataError, TokenizerError, WeightError) as error:
        raise shared.CommandError(str(error)) from error
    found = report(judged)
    print("\n".join(lines(found)))
    if args.json is not None:
        _write(args.json, found, judged, data)
    agrees = not args.compare or _compared(str(args.model), data, judged)
    return int(not agrees or (args.at_least is not None and found.accuracy < args.at_least))


def _check(args: argparse.Namespace) -> None:
    """Raises UsageError for an argument that cannot be used."""
    from mrl.families import UnsupportedModel, is_reward_model, load_arch

    shared.require_one_process()
    if args.tokens_at_once < 1 or (args.max_tokens is not None and args.max_tokens < 2):
        raise shared.UsageError("--tokens-at-once must be at least 1, and --max-tokens at least 2")
    if args.at_least is not None and not 0 <= args.at_least <= 1:
        raise shared.UsageError(f"--at-least {args.at_least:g}: must be an accuracy between 0 and 1")
    try:
        scores_texts = not load_arch(args.model).scores_steps and is_reward_model(args.model)
    except (UnsupportedModel, OSError, ValueError, KeyError) as error:
        raise shared.UsageError(str(error)) from error
    if not scores_texts:
        raise shared.UsageError(f"{args.model} does not score texts: expected a ...ForSequenceClassification")


def _progress(done: int, rows: int) -> None:
    if sys.stderr.isatty():
        print(f"\r{done}/{rows} rows", end="\n" if done == rows else "", file=sys.stderr, flush=True)


def _write(file: Path, found: AccuracyReport, judged: list[ScoredRow], data: PreferenceDataset) -> None:
    rows = [
        {"row": data.where(row), "scores": one.scores, "right": one.is_right}
        for row, one in zip(data.rows, judged, strict=True)
    ]
    left_out = sum(source.num_dropped for source in data.sources)
    content = strict_json.finite(asdict(found) | {"left_out": left_out, "scored": rows})
    with shared.writing(file):
        write_atomically(file, strict_json.dumps(content, indent=1) + "\n")


def _compared(model: str, data: PreferenceDataset, judged: list[ScoredRow]) -> bool:
    from mrl.scoring.measure import score_with_transformers

    count = min(COMPARED_ROWS, len(data))
    ours = [score for one in judged[:count] for score in one.scores]
    gap = max(abs(a - b) for a, b in zip(ours, score_with_transformers(model, data, count).tolist(), strict=True))
    print(f"transformers: the scores of {count} rows differ by at most {gap:.2g}")
    return gap <= MOST_DIFFERENCE * max(1.0, *map(abs, ours))
