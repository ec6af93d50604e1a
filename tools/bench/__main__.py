"""Times groups of kernels, compares them with other libraries and with the machine's limit, and writes the results.

    python -m tools.bench head advantages loss attention balance sync [--rounds 5] [--check] [--peers DIR]

The implementations of a group run one after the other, round by round, in one process on one thread. The results are
the minimum and the median of their processor time, and the ratio of the minimum to the group's limit, measured in the
same rounds. `--peers DIR` creates an environment in DIR with this one's packages and the other libraries, and runs in
it. `--check` compares the ratios with those in tools/bench/results/kernels.json and writes nothing; a group that is
worse is measured again with three times the rounds.

The groups convert, checkpoint, step (a GRPO step against TRL's, at three shapes; needs `--peers`) and gpu (the stage
`speed` of `make test-gpu`) are separate programs with their own limits and results.
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
# packages that the peers import at once and that mrl does not install
PEER_REQUIREMENTS = ("tensordict", "pyvers", "orjson", "cloudpickle", "codetiming", "ray", "accelerate", "hydra-core",
               "omegaconf", "antlr4-python3-runtime==4.9.3", "msgpack", "jsonschema", "jsonschema-specifications",
               "referencing", "rpds-py", "attrs")  # fmt: skip
PROGRAMS = {
    "convert": ["tools/bench/convert.py"],
    "checkpoint": ["tools/bench/save_stall.py"],
    "gpu": ["-m", "tools.gpu.run", "--stages", "speed"],
}
STEP = "step"
STEP_SHAPES = ("toy", "uneven", "vocabulary")
TOLERANCE = 1.25  # growth of a ratio that `--check` takes for noise


def main() -> None:
    from tools.bench import kernel_groups, record

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("groups", nargs="+", choices=sorted({**kernel_groups.GROUPS, **PROGRAMS, STEP: ""}))
    parser.add_argument("--rounds", type=int, default=5)
    check_help = "exit with 1 if mrl's ratios are worse than the committed ones"
    parser.add_argument("--check", action="store_true", help=check_help)
    parser.add_argument("--peers", type=Path, help="directory of the peers' environment; created if it does not exist")
    args = parser.parse_args()
    programs = [PROGRAMS[name] for name in args.groups if name in PROGRAMS]
    if programs and (args.check or args.peers):
        parser.error(f"{', '.join(sorted({*args.groups} & {*PROGRAMS}))}: run without --check and --peers")
    if STEP in args.groups and (args.check or not args.peers):
        parser.error(f"{STEP}: needs TRL: run with --peers and without --check")
    if args.peers and Path(sys.prefix) != args.peers.resolve():
        sys.exit(run_with_peers(args.peers.resolve()))
    for program in programs:
        subprocess.run([sys.executable, *program], cwd=ROOT, check=True)
    for shape in STEP_SHAPES if STEP in args.groups else ():
        command = [sys.executable, "tools/bench/grpo_vs_trl.py", "--trl-python", sys.executable, "--shape", shape]
        subprocess.run([*command, "--rounds", str(args.rounds)], cwd=ROOT, check=True)
    kernels = [name for name in args.groups if name not in PROGRAMS and name != STEP]
    file = record.RESULTS / "kernels.json"
    before = json.loads(file.read_text()) if file.is_file() else {}
    results = {name: kernel_groups.measure(name, args.rounds) for name in kernels}
    if args.check:
        worse = worse_groups(results, before.get("groups", {}))  # perhaps because of other load on the machine
        again = {name: kernel_groups.measure(name, 3 * args.rounds) for name in worse}
        sys.exit(1 if worse_groups(again, before.get("groups", {})) else 0)
    if results:
        record.write(file, {"peers": peer_versions(), "groups": {**before.get("groups", {}), **results}})


def run_with_peers(directory: Path) -> int:
    """Runs this command in the peers' environment, which is created if it does not exist; returns its exit status."""
    python = directory / "bin" / "python"
    if not python.exists():
        subprocess.run([sys.executable, "-m", "venv", str(directory)], check=True)
        site = subprocess.run(
            [python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"],
            check=True, capture_output=True, text=True,
        ).stdout.strip()  # fmt: skip
        (Path(site) / "parent.pth").write_text(sysconfig.get_path("purelib") + "\n")
        subprocess.run([python, "-m", "pip", "install", "-q", "--no-deps", *PEERS, *PEER_REQUIREMENTS], check=True)
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run([python, "-m", "tools.bench", *sys.argv[1:]], cwd=ROOT, env=env).returncode


def peer_versions() -> dict[str, str]:
    versions = {}
    for package in PEERS:
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            versions[package] = "not installed"
    return versions


def worse_groups(
    results: dict[str, dict[str, dict[str, float]]], before: dict[str, dict[str, dict[str, float]]]
) -> list[str]:
    """Returns, and prints, the groups in which an implementation of mrl has a higher ratio to the limit than before."""
    worse = []
    for group, forms in results.items():
        for name, form in forms.items():
            was = before.get(group, {}).get(name)
            if name.startswith("mrl") and was and form["of_limit"] > TOLERANCE * was["of_limit"]:
                print(f"{group}: {name} takes {form['of_limit']} times the limit; committed: {was['of_limit']}")
                worse.append(group)
    return list(dict.fromkeys(worse))


if __name__ == "__main__":
    main()
