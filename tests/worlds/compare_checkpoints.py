"""How far two checkpoints of runs of the same model are apart. Usage: compare_checkpoints.py A B VOCAB

Prints a JSON object: part.kind -> the worst relative L2 difference of its tensors (of counters, the absolute one), 0.0
only if all are equal to the bit. Rows of vocabulary padding are left out.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch

from mrl import platform

platform.install()

from megatron.core import dist_checkpointing  # noqa: E402


def kind_of(key: str) -> str:
    return key.split(".")[2] if key.startswith("optimizer.state.") else "weights"


def relative(a: torch.Tensor, b: torch.Tensor) -> float:
    if torch.equal(a, b):
        return 0.0
    return float((a.double() - b.double()).norm() / b.double().norm()) or 1e-30


def main() -> None:
    first, second, vocab = Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3])
    platform.init_process_group(120)
    worst: dict[str, float] = {}
    for part in json.loads((first / "complete").read_text())["learners"]:
        x, y = (dist_checkpointing.load_plain_tensors(str(path / part)) for path in (first, second))
        assert x.keys() == y.keys(), sorted(x.keys() ^ y.keys())
        for key, a in x.items():
            name, difference = f"{part}.counters", abs(a - y[key]) if not isinstance(a, torch.Tensor) else 0.0
            if isinstance(a, torch.Tensor):
                padded = "word_embeddings" in key or "output_layer" in key
                name, difference = (
                    f"{part}.{kind_of(key)}",
                    relative(*(t[:vocab] if padded else t for t in (a, y[key]))),
                )
            worst[name] = max(worst.get(name, 0.0), float(difference))
    print(json.dumps(worst))
    torch.distributed.destroy_process_group()


main()
