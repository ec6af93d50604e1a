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

from tests.helpers.stored import differences  # noqa: E402


def relative(a: torch.Tensor, b: torch.Tensor) -> float:
    if torch.equal(a, b):
        return 0.0
    return float((a.double() - b.double()).norm() / b.double().norm()) or 1e-30


def main() -> None:
    worst = differences(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]), relative)
    print(json.dumps({f"{part}.{kind}": difference for (part, kind), difference in worst.items()}))


main()
