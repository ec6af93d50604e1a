"""What several subcommands say of a configuration."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mrl.config.schema import Config

CONFIG_ERROR = 2


def add_config(parser: argparse.ArgumentParser, example: str) -> None:
    """CONFIG and KEY=VALUE..., as `args.config` and `args.overrides`."""
    parser.add_argument("config", type=Path, metavar="CONFIG", help="YAML file")
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help=f"such as {example}")


def is_refused(cfg: Config) -> bool:
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
