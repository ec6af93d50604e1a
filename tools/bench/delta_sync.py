"""Delta weight sync: sizes and speeds of encodings of changed elements, and bytes that runs with `sync.delta` sent.

    python tools/bench/delta_sync.py [NAME=RUN_DIR ...]

The encodings are measured with changes at random positions of normally distributed bfloat16 weights. The bytes are read
from the metrics of finished runs. Writes tools/bench/results/delta_sync.json.
"""

from __future__ import annotations

import sys
import time
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402

from mrl.inference.delta import decode, encode  # noqa: E402
from mrl.observe import read_metrics  # noqa: E402
from tools.bench import record  # noqa: E402

ELEMENTS = 8 << 20
SHARES = (0.001, 0.01, 0.03, 0.1, 0.3)
METRICS = ("sync/changed_share", "sync/network_bytes", "sync/bytes", "perf/sync_s")


def timed(call: Callable[[], Any]) -> tuple[float, Any]:
    """Returns the seconds of the fastest of three calls, and the value."""
    seconds = []
    for _ in range(3):
        began = time.monotonic()
        value = call()
        seconds.append(time.monotonic() - began)
    return min(seconds), value


def encodings(share: float) -> dict[str, float]:
    """Returns sizes relative to the whole weights, and speeds in MB per second."""
    generator = torch.Generator().manual_seed(0)
    weights = (torch.randn(ELEMENTS, generator=generator) * 0.02).bfloat16()
    old, is_changed = weights.view(torch.uint8), torch.rand(ELEMENTS, generator=generator) < share
    new = torch.where(is_changed, weights.view(torch.int16) + 1, weights.view(torch.int16)).view(torch.uint8)
    encode_s, (changes, changed) = timed(lambda: encode(new, old, 2))
    values = 2 * changed
    if changes is None:
        return {"share": share, "bitmap": (ELEMENTS / 8 + values) / new.numel(), "gaps": 1.0}
    decode_s, _ = timed(lambda: decode(changes, new.numel(), 2, changed))
    zlib_s, packed = timed(lambda: zlib.compress(changes.numpy().tobytes(), 1))
    return {
        "share": share,
        "bitmap": (ELEMENTS / 8 + values) / new.numel(),
        "gaps": changes.numel() / new.numel(),
        "gaps_zlib": len(packed) / new.numel(),
        "encode_mb_per_s": new.numel() / encode_s / 1e6,
        "decode_mb_per_s": new.numel() / decode_s / 1e6,
        "zlib_mb_per_s": changes.numel() / zlib_s / 1e6,
    }


def run(directory: Path) -> list[dict[str, float]]:
    """Returns the metrics of a run's weight syncs, one row per step."""
    steps = [step for step in read_metrics(directory) if "sync/bytes" in step]
    return [{name: step[name] for name in METRICS if name in step} for step in steps]


def main() -> None:
    torch.set_num_threads(1)
    runs = dict(argument.split("=", 1) for argument in sys.argv[1:])
    figures = {
        "encodings": [encodings(share) for share in SHARES],
        "runs": {name: run(Path(directory)) for name, directory in runs.items()},
    }
    for row in figures["encodings"]:
        print(row)
    record.write(record.RESULTS / "delta_sync.json", figures)


if __name__ == "__main__":
    main()
