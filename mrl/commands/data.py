"""`mrl data`: shows a configuration's data as the model sees it."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mrl.commands import shared
from mrl.imports import importing

if TYPE_CHECKING:
    from mrl.config.schema import Config


def add(commands: Any) -> None:
    """Adds the subcommand and its arguments."""
    parser = commands.add_parser("data", help="show a configuration's data as the model receives it")
    shared.add_config(parser, "data.chat_template=true")
    parser.add_argument("--samples", type=int, default=3, metavar="N", help="prompts to show (default: 3)")
    parser.add_argument("--sheet", type=Path, metavar="FILE.png", help="write the images of these prompts to this file")
    parser.description = (
        "Reads and tokenizes all sources as the run would. Shows which rows are left out or truncated, the lengths in "
        "tokens, and the run's first prompts after the chat template, with their special tokens."
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Shows the data. Returns exit code 0, or 1 if the data is unusable."""
    from mrl.config.schema import Config
    from mrl.config.trainers.table import trainer_of
    from mrl.preflight.finding import problems

    with importing():
        from mrl.data import DataError, TokenizerError
        from mrl.preflight.checks import INPUT_CHECKS, run_checks

    cfg = shared.load_read_only(args.config, args.overrides)
    if args.sheet is not None and not cfg.sees_pictures:
        raise shared.UsageError(f"--sheet: the data of trainer {cfg.trainer} has no images: leave --sheet out")
    own = trainer_of(cfg).load_preview()
    if own is None and (wrong := problems(list(run_checks(cfg, INPUT_CHECKS)))):
        print("\n".join(map(str, wrong)), file=sys.stderr)
        return 1
    try:
        if own is not None:
            lines = own(cfg, args.samples)
        else:
            assert isinstance(cfg, Config)
            lines = _previews(cfg, args)
        for line in lines:
            print(line)
    except (DataError, TokenizerError) as error:
        print(error, file=sys.stderr)
        return 1
    return 0


def _previews(cfg: Config, args: argparse.Namespace) -> Iterator[str]:
    """Yields the preview of each adapter's data; of a run with one policy that of its data."""
    from mrl.data.preview import preview
    from mrl.preflight.inputs import sampled_row_check

    for name, own in (cfg.adapter_configs() or {"": cfg}).items():
        if name:
            yield f"\nadapter {name}"
        yield from preview(own, args.samples, sampled_row_check(own), args.sheet)
