"""Measures wall and processor time of `mrl train` from the command to the end of its first step.

    python tools/bench/start.py [CONFIG] [--against TREE] [--rounds 5] [--engines sglang transformers]
                                [--results tools/bench/results/start.json]

By default a tiny policy, with one rank and an engine that the run starts. A first run, which is not counted, warms the
page cache. TREE is another checkout that is measured in turn with this one, in the same environment; --against-path
puts a folder with modules that it lacks before it on PYTHONPATH. Processor time is that of all processes until the
command has ended.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import yaml

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from mrl.packages import commit  # noqa: E402
from tests.helpers.tiny import make_tiny  # noqa: E402
from tests.helpers.train_tools import write_config  # noqa: E402
from tools.bench import record  # noqa: E402

ENGINES = ("sglang", "transformers")
RUN_TIMEOUT_S = 600


@dataclass(frozen=True)
class Start:
    """wall_s: seconds to the end of step 1. cpu_s: processor seconds until the command ended."""

    wall_s: float
    cpu_s: float


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config", nargs="?", type=Path, help="configuration to measure (default: a tiny policy)")
    parser.add_argument("--against", type=Path, metavar="TREE", help="another checkout to measure")
    parser.add_argument("--against-path", type=Path, metavar="FOLDER", help="folder before TREE on PYTHONPATH")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--engines", nargs="+", choices=ENGINES, default=ENGINES)
    parser.add_argument("--results", type=Path, default=record.RESULTS / "start.json")
    args = parser.parse_args()
    paths = {"this": [ROOT]}
    if args.against is not None:
        paths["against"] = [*filter(None, [args.against_path]), args.against]
    results: dict[str, object] = {"rounds": args.rounds, "load_before": os.getloadavg()}
    if args.against is not None:
        results["against"] = commit(args.against)
    with tempfile.TemporaryDirectory() as name:
        config = (args.config or _tiny(Path(name))).absolute()
        for engine in args.engines:
            starts_by_tree: dict[str, list[Start]] = {tree: [] for tree in paths}
            for number in range(args.rounds + 1):
                for tree, path in paths.items():
                    measured = start(config, Path(name), engine, path)
                    starts_by_tree[tree] += [measured] if number else []
                    print(engine, tree, number or "warm-up", measured, flush=True)
            results[engine] = {tree: summary(starts) for tree, starts in starts_by_tree.items()}
    print(json.dumps(results, indent=1))
    record.write(args.results, results)


def start(config: Path, folder: Path, engine: str, path: list[Path]) -> Start:
    """Times one start. path: PYTHONPATH with the tree to measure"""
    root = Path(tempfile.mkdtemp(dir=folder))
    command = [sys.executable, "-m", "mrl", "train", str(config), "run.name=run", f"run.root={root}", "run.steps=1"]
    paths = os.pathsep.join(str(folder.absolute()) for folder in path)
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": paths}
    began = time.time()
    with (root / "terminal").open("wb") as out:
        process = subprocess.Popen(
            ["timeout", str(RUN_TIMEOUT_S), *command, f"rollout.engine={engine}"],
            cwd=root,
            env=environment,
            stdout=out,
            stderr=subprocess.STDOUT,
        )
        _, status, used = os.wait4(process.pid, 0)
    if status:
        sys.exit(f"{' '.join(command)} failed:\n{(root / 'terminal').read_text()[-4000:]}")
    row = json.loads((root / "run/metrics.jsonl").read_text().splitlines()[0])
    return Start(round(row["unix_time"] - began, 2), round(used.ru_utime + used.ru_stime, 2))


def summary(starts: list[Start]) -> dict[str, dict[str, float]]:
    """Returns the minimum and the median of wall_s and cpu_s."""
    columns = {"wall_s": [start.wall_s for start in starts], "cpu_s": [start.cpu_s for start in starts]}
    return {
        name: {"min": min(values), "median": round(statistics.median(values), 2)} for name, values in columns.items()
    }


def _tiny(folder: Path) -> Path:
    file = write_config(folder, make_tiny(folder / "model", "llama"))
    config = yaml.safe_load(file.read_text())
    del config["run"]["trackers"]  # older trees do not have this key
    file.write_text(yaml.safe_dump(config))
    return file


if __name__ == "__main__":
    main()
