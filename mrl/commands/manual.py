"""`mrl config`: keys of a configuration with defaults and meaning, or the values of a configuration file."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from mrl.commands import shared


def add(commands: Any) -> None:
    """Adds the subcommand and its arguments."""
    parser = commands.add_parser("config", help="show configuration keys with their meaning, or a file's values")
    parser.add_argument("key", nargs="?", metavar="SECTION|KEY|CONFIG", help="such as actor.optimizer.lr or my.yaml")
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="with CONFIG: overrides")
    parser.add_argument("--markdown", action="store_true", help="print all keys as Markdown (docs/configuration.md)")
    parser.description = (
        "Explains a section or key; without one, lists the sections. With CONFIG, a YAML file or a run directory, it "
        "prints every key with its value, after base files, defaults and overrides."
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Prints the pages of a key, all keys, or a configuration."""
    from mrl.config import loader, manual

    config = Path(args.key or "")
    is_config = config.suffix in (".yaml", ".yml") or (config / "config.yaml").is_file()
    if args.key and args.markdown or args.overrides and not is_config:
        raise shared.UsageError("KEY=VALUE goes with a YAML file or run directory, and --markdown stands alone")
    try:
        if args.markdown:
            print(manual.markdown(), end="")
        elif args.key and is_config:
            print(loader.dump_resolved(shared.load_read_only(config, args.overrides)), end="")
        else:
            print(manual.text(args.key))
    except manual.UnknownKey as error:
        raise shared.UsageError(str(error)) from None
    return 0
