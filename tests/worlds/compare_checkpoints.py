"""Prints the difference between two checkpoints of runs of the same model. Usage: compare_checkpoints.py A B VOCAB

The output is a JSON object: part.kind -> worst relative L2 difference of a tensor (absolute difference of counters);
0.0 only if all are bitwise equal. Rows of vocabulary padding are left out.
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
