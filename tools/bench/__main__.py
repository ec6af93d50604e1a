"""Times groups of kernels beside their peers and the limit of this machine, and writes what it finds.

    python -m tools.bench head advantages loss attention balance sync [--rounds 5] [--check] [--peers DIR]

A group's forms run one after the other, round by round, in one process on one thread; processor time counts, the
minimum and the median over the rounds. Each row has the ratio to the group's limit, which is measured in the same
rounds. `--peers DIR` makes an environment there in which this one's packages and the peers can be imported, and runs in
it. `--check` compares the ratios with those in tools/bench/results/kernels.json, and writes nothing; a group
that is worse is measured once more, three times as long.

The groups convert, checkpoint, step (a GRPO step against TRL's, at three shapes; with `--peers`) and gpu (the stage
`speed` of `make test-gpu`, on a machine that has one) are programs of their own, with their own limits and results.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import sysconfig
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PEERS = ("verl", "trl", "liger-kernel")
# of what the peers' modules import at once, that is not here already
THEIR_NEEDS = ("tensordict", "pyvers", "orjson", "cloudpickle", "codetiming", "ray", "accelerate", "hydra-core",
               "omegaconf", "antlr4-python3-runtime==4.9.3", "msgpack", "jsonschema", "jsonschema-specifications",
               "referencing", "rpds-py", "attrs")  # fmt: skip
PROGRAMS = {
    "convert": ["tools/bench/convert.py"],
    "checkpoint": ["tools/bench/save_stall.py"],
    "gpu": ["-m", "tools.gpu.run", "--stages", "speed"],
}
STEP = "step"
STEP_SHAPES = ("toy", "uneven", "vocabulary")
WORSE = 1.25  # of a ratio, that `--check` takes for noise


def main() -> None:
    from tools.bench import kernel_groups, record

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("groups", nargs="+", choices=sorted({**kernel_groups.GROUPS, **PROGRAMS, STEP: ""}))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--check", action="store_true", help="exit status 1 where mrl's ratios are worse than before")
    parser.add_argument("--peers", type=Path, help="where the peers' environment is, or shall be")
    args = parser.parse_args()
    programs = [PROGRAMS[name] for name in args.groups if name in PROGRAMS]
    if programs and (args.check or args.peers):
        parser.error(f"{', '.join(sorted({*args.groups} & {*PROGRAMS}))}: run without --check and --peers")
    if STEP in args.groups and (args.check or not args.peers):
        parser.error(f"{STEP}: run with --peers, where TRL is, and without --check")
    if args.peers and Path(sys.prefix) != args.peers.resolve():
        sys.exit(_in_environment(args.peers.resolve()))
    for program in programs:
        subprocess.run([sys.executable, *program], cwd=ROOT, check=True)
    for shape in STEP_SHAPES if STEP in args.groups else ():
        command = [sys.executable, "tools/bench/grpo_vs_trl.py", "--trl-python", sys.executable, "--shape", shape]
        subprocess.run([*command, "--rounds", str(args.rounds)], cwd=ROOT, check=True)
    kernels = [name for name in args.groups if name not in PROGRAMS and name != STEP]
    file = record.RESULTS / "kernels.json"
    before = json.loads(file.read_text()) if file.is_file() else {}
    found = {name: kernel_groups.measure(name, args.rounds) for name in kernels}
    if args.check:
        doubted = _worse(found, before.get("groups", {}))  # others' work beside it may have been the reason
        again = {name: kernel_groups.measure(name, 3 * args.rounds) for name in doubted}
        sys.exit(1 if _worse(again, before.get("groups", {})) else 0)
    if found:
        record.write(file, {"peers": _versions(), "groups": {**before.get("groups", {}), **found}})


def _in_environment(directory: Path) -> int:
    """The exit status of this very command there."""
    python = directory / "bin" / "python"
    if not python.exists():
        subprocess.run([sys.executable, "-m", "venv", str(directory)], check=True)
        site = subprocess.run(
            [python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"],
            check=True, capture_output=True, text=True,
        ).stdout.strip()  # fmt: skip
        (Path(site) / "parent.pth").write_text(sysconfig.get_path("purelib") + "\n")
        subprocess.run([python, "-m", "pip", "install", "-q", "--no-deps", *PEERS, *THEIR_NEEDS], check=True)
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run([python, "-m", "tools.bench", *sys.argv[1:]], cwd=ROOT, env=env).returncode


def _versions() -> dict[str, str]:
    found = {}
    for package in PEERS:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "not there"
    return found


def _worse(found: dict[str, dict[str, dict[str, float]]], before: dict[str, dict[str, dict[str, float]]]) -> list[str]:
    """The groups of which a form of mrl's takes more of the limit than it did, which is printed."""
    worse = []
    for group, forms in found.items():
        for name, form in forms.items():
            was = before.get(group, {}).get(name)
            if name.startswith("mrl") and was and form["of_limit"] > WORSE * was["of_limit"]:
                print(f"{group}: {name} takes {form['of_limit']} of the limit; {was['of_limit']} in the results")
                worse.append(group)
    return list(dict.fromkeys(worse))


if __name__ == "__main__":
    main()
