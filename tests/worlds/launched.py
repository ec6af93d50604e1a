"""Runs two ranks under mrl's own launcher, or one under another. Usage: launched.py mrl|torchrun|ft MODULE ..."""

from __future__ import annotations

import sys
from pathlib import Path

from mrl.config.schema import SectionTimeouts
from mrl.launcher import ElasticJob, RankForkServer, launch, launch_elastic
from mrl.resilience import ft_config


def main() -> int:
    kind, *arguments = sys.argv[1:]
    if kind == "mrl":
        with RankForkServer() as fork_server:
            return launch([sys.executable, "-m", *arguments], 2, Path("logs"), settle_s=2, fork_server=fork_server)
    ft = ft_config.write(Path(), SectionTimeouts()) if kind == "ft" else None
    return launch_elastic(ElasticJob(kind, arguments, 1, 0, None, {}, ft), Path())  # type: ignore[arg-type]


if __name__ == "__main__":
    sys.exit(main())
