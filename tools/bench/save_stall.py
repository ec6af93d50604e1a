"""Measures how long a checkpoint stops training: a synchronous save, and an asynchronous one.

    python tools/bench/save_stall.py [--rounds 5] [--work DIR]

One process, and two data-parallel ones. Each round times updates without a save, a synchronous save, a plain write of
the checkpoint's bytes to the same disk, file by file and synced, and an asynchronous save during which updates go on.
The results are the minimum and the median over the rounds. DIR (default: a temporary directory) holds at most three
checkpoints, and is empty at the end.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from tools.bench import record  # noqa: E402

MODEL = {
    "vocab_size": 4096,
    "hidden_size": 512,
    "intermediate_size": 1536,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 512,
    "tie_word_embeddings": True,
}
TOKENS = 256  # per update
WARM_UPDATES, UPDATES = 2, 6
WORLD_TIMEOUT_S = 900


def make_model(directory: Path) -> None:
    from transformers import AutoConfig

    config = AutoConfig.for_model("llama", **MODEL)
    config.architectures = ["LlamaForCausalLM"]
    config.save_pretrained(directory)


class RankBench:
    """A learner and a rollout on every rank of a world."""

    def __init__(self, work: Path) -> None:
        import torch

        from mrl import platform

        platform.install()
        from mrl.config.schema import OptimizerConfig, ParallelConfig, TrainConfig
        from mrl.core import Rollout
        from mrl.families import load_arch
        from mrl.learner import Learner, losses
        from mrl.parallel import Meshes

        platform.init_process_group(WORLD_TIMEOUT_S)
        mesh = Meshes(WORLD_TIMEOUT_S).get(ParallelConfig())
        train = TrainConfig(optimizer=OptimizerConfig(lr=1e-4), max_tokens_per_microbatch=TOKENS)
        path = str(work / "model")
        self.learner = Learner(
            "policy", load_arch(path), path, train, mesh, dtype=torch.float32, seed=1, from_scratch=True
        )
        samples, length = 4, TOKENS // 4
        lengths, ones = torch.full((samples,), length), torch.ones(samples, dtype=torch.int64)
        count = samples * (length - 1)
        tokens = torch.arange(TOKENS) * 7 % MODEL["vocab_size"]
        self.rollout = Rollout(0, tokens, lengths, ones, torch.arange(4), torch.zeros(4), torch.zeros(count))
        self.loss = losses.cross_entropy(torch.full((count,), 1 / count))
        self.work = work

    def update(self) -> float:
        began = time.monotonic()
        self.learner.backward(self.rollout, range(self.rollout.num_samples), self.loss, 1.0)
        self.learner.step()
        return time.monotonic() - began

    def save(self, asynchronous: bool) -> dict[str, float]:
        """Saves a checkpoint.

        Returns:
            stall: seconds that training stopped
            copy: seconds of the stall for copying the tensors
            write: seconds until the files were written
            update_meanwhile: median seconds of an update during an asynchronous save
            mib: MiB of tensors
            memory_mib: largest growth of this rank's memory
        """
        from mrl import platform
        from mrl.checkpoint import SavedCheckpoint, Saver
        from mrl.config.schema import CheckpointConfig

        saved: list[SavedCheckpoint] = []
        name = "async" if asynchronous else "sync"
        saver = Saver(self.work / name, CheckpointConfig(asynchronous=asynchronous, keep_last=1), saved.append)
        platform.reset_peak_memory()
        before, began = platform.peak_memory_bytes(), time.monotonic()
        saver.save(1, {"actor": self.learner}, {})
        stall = time.monotonic() - began
        updates = []
        while saver.is_writing:
            updates.append(self.update())
            saver.poll()
        row = {"stall": stall, "copy": saved[0].copy_s, "write": saved[0].write_s, "mib": saved[0].nbytes / 2**20}
        row["memory_mib"] = (platform.peak_memory_bytes() - before) / 2**20
        return row | ({"update_meanwhile": statistics.median(updates)} if updates else {})

    def plain_write(self) -> float:
        """Writes and syncs files with the contents of the checkpoint's, one after the other; returns the seconds."""
        files = [file for file in (self.work / "sync").rglob("*") if file.is_file()]
        contents = [file.read_bytes() for file in files]
        target, began = self.work / "plain", time.monotonic()
        target.mkdir()
        for number, content in enumerate(contents):
            with (target / str(number)).open("wb") as file:
                file.write(content)
                os.fsync(file.fileno())
        seconds = time.monotonic() - began
        shutil.rmtree(target)
        return seconds


def run_rank(work: Path, rounds: int) -> None:
    """Measures on this rank of torchrun; rank 0 prints the rows as JSON."""
    import torch.distributed as dist

    bench = RankBench(work)
    for _ in range(WARM_UPDATES):
        bench.update()
    for asynchronous in (False, True):
        bench.save(asynchronous)  # warm-up: the first save of a process imports and allocates
    rows: dict[str, list[dict[str, float]]] = {"sync": [], "async": [], "alone": []}
    for _ in range(rounds):
        rows["alone"].append({"update": statistics.median(bench.update() for _ in range(UPDATES))})
        rows["sync"].append(bench.save(asynchronous=False))
        dist.barrier()
        if dist.get_rank() == 0:
            rows["alone"][-1]["plain_write"] = bench.plain_write()
        dist.barrier()
        rows["async"].append(bench.save(asynchronous=True))
    if dist.get_rank() == 0:
        print(json.dumps(rows), flush=True)
    dist.destroy_process_group()


def measure(nproc: int, rounds: int, work: Path) -> dict[str, Any]:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={nproc}"]
    command += [__file__, "--rank", "--rounds", str(rounds), "--work", str(work)]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=WORLD_TIMEOUT_S)
    for name in ("sync", "async"):
        shutil.rmtree(work / name, ignore_errors=True)
    if done.returncode != 0:
        raise SystemExit(done.stderr[-4000:])
    rows = json.loads(done.stdout.splitlines()[-1])
    return {
        part: {name: summary([row[name] for row in part_rows]) for name in part_rows[0]}
        for part, part_rows in rows.items()
    }


def summary(values: list[float]) -> dict[str, float]:
    return {"minimum": round(min(values), 4), "median": round(statistics.median(values), 4)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--work", type=Path, help="directory of the checkpoints (default: a temporary one)")
    parser.add_argument("--rank", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.rank:
        run_rank(args.work, args.rounds)
        return
    with tempfile.TemporaryDirectory(prefix="save_stall_", dir=args.work) as folder:
        make_model(Path(folder) / "model")
        results = {
            "one process": measure(1, args.rounds, Path(folder)),
            "two data-parallel": measure(2, args.rounds, Path(folder)),
        }
    print(json.dumps(results, indent=1))
    figures = {
        "model": MODEL,
        "dtype": "float32",
        "rounds": args.rounds,
        "unit": "seconds; mib: tensors in a checkpoint; memory_mib: growth of rank 0's resident set during a save",
        "results": results,
    }
    record.write(record.RESULTS / "save_stall.json", figures)


if __name__ == "__main__":
    main()
