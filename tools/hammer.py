"""Attack test: trains a tiny model twice, the second time while another account attacks its engines' ports.

    python tools/hammer.py [--engine sglang|transformers] [--steps N]

Prints the outcomes of the attacks, and the samples and weights that differ from the undisturbed run's (none should).
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from mrl.config.engines import ENGINES  # noqa: E402
from tests.helpers.tiny import make_tiny  # noqa: E402
from tests.helpers.train_tools import Train, write_config  # noqa: E402

RUN_S = 1200.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", choices=[*ENGINES], default="sglang")
    parser.add_argument("--steps", type=int, default=60)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model, foreign = (make_tiny(folder / f"model_{seed}", "llama", seed=seed) for seed in (0, 1))
        print(json.dumps(measure(folder, model, foreign, args.engine, args.steps), indent=1))


def measure(folder: Path, model: Path, foreign: Path, engine: str, steps: int) -> dict[str, Any]:
    """Trains with and without attacks.

    Returns:
        seconds: duration of the attacks
        attacks: {attack: {outcome: count}}
        written: files that engines wrote on the attacker's request
        differences: files of samples and weights that differ from the undisturbed run's
    """
    config = write_config(
        folder,
        model,
        run={"steps": steps},
        rollout={"engine": engine, "sampling": {"max_new_tokens": 16}},
        checkpoint={"export_hf": True},
    )
    written = folder / "hammer.json.written"
    written.mkdir()
    written.chmod(0o777)
    with Train(folder, config, "run.name=alone") as run:
        assert run.wait(RUN_S) == 0, run.terminal
    stranger = [sys.executable, str(ROOT / "tests/worlds/stranger.py"), str(model), str(foreign)]
    started = time.monotonic()
    with subprocess.Popen([*stranger, str(RUN_S), str(folder / "hammer.json")]) as process:
        with Train(folder, config, "run.name=hammered") as run:
            assert run.wait(RUN_S) == 0, run.terminal
        seconds = time.monotonic() - started
        process.terminate()
    attacks = json.loads((folder / "hammer.json").read_text())
    if not attacks:
        raise RuntimeError("the attacker found no engine: see engine_ports in tests/worlds/stranger.py")
    return {
        "seconds": round(seconds, 1),
        "attacks": attacks,
        "written": [file.name for file in written.iterdir()],
        "differences": differences(folder / "runs/alone", folder / "runs/hammered"),
    }


def differences(alone: Path, hammered: Path) -> list[str]:
    files = [*sorted(alone.glob("rollouts/*.jsonl")), alone / "hf" / "model.safetensors"]
    names = [file.relative_to(alone) for file in files]
    return [str(name) for name in names if (alone / name).read_bytes() != (hammered / name).read_bytes()]


if __name__ == "__main__":
    main()
