"""Compares the speed of conversion with plain reads, writes and copies of as many bytes, and checks its memory use.

Usage: python tools/bench/convert.py [--gb 2] [--rounds 3] [--workers 4] [--folder DIR] [--ram DIR] [--out FILE]

Converts a synthetic Llama in bfloat16 with random weights, in safetensors files of half a GB. Each round measures plain
reads into a preallocated buffer; then, on the disk and in a folder in memory, plain writes and a plain copy by as many
threads as the conversion has, and both conversions. The files are dropped from the page cache before each measurement.
Each conversion runs in its own process, whose resident memory must not grow by more than a file and a bucket.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent.parent
sys.path.insert(0, str(ROOT))

from tools.bench import record  # noqa: E402

BUFFER_BYTES = 32 << 20
SHARD_BYTES = 500_000_000
HIDDEN, FFN, HEADS, KV_HEADS, VOCAB = 2048, 8192, 16, 8, 32_000
GROWTH_LIMIT = SHARD_BYTES + (32 << 20)
TIMEOUT_S = 200


def make_model(path: Path, nbytes: int) -> None:
    """Writes config.json and shards of normally distributed weights."""
    import torch

    from mrl.families import load_arch
    from mrl.families.table import weight_table
    from mrl.weights.convert.plan import create_files, header_of
    from mrl.weights.meta import TensorMeta
    from mrl.weights.model.export import plan_files, write_index

    layer = 2 * (HIDDEN * HIDDEN * 2 + 2 * HIDDEN * HIDDEN * KV_HEADS // HEADS + 3 * HIDDEN * FFN)
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": HIDDEN, "intermediate_size": FFN,
        "num_hidden_layers": max(1, (nbytes - 4 * VOCAB * HIDDEN) // layer), "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS, "vocab_size": VOCAB, "max_position_embeddings": 4096, "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False, "dtype": "bfloat16",
    }  # fmt: skip
    path.mkdir()
    (path / "config.json").write_text(json.dumps(config))
    rows = weight_table(load_arch(path)).values()
    shapes = {name: shape for row in rows for name, shape in zip(row.hf, row.shapes, strict=True)}
    files = plan_files([TensorMeta(name, shape, torch.bfloat16, 0) for name, shape in shapes.items()], SHARD_BYTES)
    create_files(files, path)
    write_index(files, path)
    noise = (torch.randn(BUFFER_BYTES // 2) * 0.02).bfloat16().view(torch.uint8).numpy().data
    for file in files:
        start = len(header_of(file.tensors))
        end = start + sum(meta.nbytes for meta in file.tensors)
        with (path / file.name).open("r+b") as out:
            out.seek(start)
            while out.tell() < end:
                out.write(noise[: min(len(noise), end - out.tell())])
            os.fsync(out.fileno())


def drop_from_page_cache(path: Path) -> None:
    """Drops the files from the page cache."""
    os.sync()
    for file in path.rglob("*"):
        if file.is_file():
            descriptor = os.open(file, os.O_RDONLY)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(descriptor)


def plain_read(path: Path) -> float:
    """Returns the GB/s of reading the files, one after the other, into one buffer."""
    drop_from_page_cache(path)
    buffer, total, started = memoryview(bytearray(BUFFER_BYTES)), 0, time.monotonic()
    for file in sorted(path.rglob("*")):
        if file.is_file():
            descriptor = os.open(file, os.O_RDONLY)
            while count := os.readv(descriptor, [buffer]):
                total += count
            os.close(descriptor)
    return total / 1e9 / (time.monotonic() - started)


def plain_write(folder: Path, nbytes: int, workers: int) -> float:
    """Returns the GB/s of writing as many bytes and syncing them, from one buffer per thread."""

    def work(number: int) -> None:
        buffer = bytes(os.urandom(1 << 20)) * (BUFFER_BYTES >> 20)
        with (folder / f"plain_{number}").open("wb", buffering=0) as out:
            for at in range(0, nbytes // workers, BUFFER_BYTES):
                out.write(memoryview(buffer)[: nbytes // workers - at])
                os.fdatasync(out.fileno())

    return _timed(work, folder, nbytes, workers)


def plain_copy(path: Path, folder: Path, workers: int) -> float:
    """Returns the GB/s of reading and writing: the limit of a conversion."""
    drop_from_page_cache(path)
    files = sorted(path.glob("*.safetensors"))
    spans = [(file, at) for file in files for at in range(0, file.stat().st_size, BUFFER_BYTES)]
    nbytes = sum(file.stat().st_size for file in files)

    def work(number: int) -> None:
        buffer = memoryview(bytearray(BUFFER_BYTES))
        with (folder / f"plain_{number}").open("wb", buffering=0) as out:
            for file, at in spans[number * len(spans) // workers : (number + 1) * len(spans) // workers]:
                with file.open("rb", buffering=0) as source:
                    source.seek(at)
                    out.write(buffer[: source.readinto(buffer)])
                os.fdatasync(out.fileno())

    return _timed(work, folder, nbytes, workers)


def _timed(work: Callable[[int], None], folder: Path, nbytes: int, workers: int) -> float:
    """Returns the GB/s of threads that write files `plain_*`; removes these files."""
    started = time.monotonic()
    with ThreadPoolExecutor(workers) as pool:
        list(pool.map(work, range(workers)))
    seconds = time.monotonic() - started
    for file in folder.glob("plain_*"):
        file.unlink()
    return nbytes / 1e9 / seconds


def conversion(direction: str, source: Path, target: Path, workers: int) -> dict[str, float]:
    """Converts in a new process, from a cold page cache."""
    drop_from_page_cache(source)
    command = [sys.executable, __file__, "--child", direction, str(source), str(target), str(workers)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, cwd=ROOT)
    if done.returncode:
        sys.exit(f"{direction} failed: {done.stderr[-3000:]}")
    numbers: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return numbers


def child(direction: str, source: str, target: str, workers: str) -> None:
    import torch.distributed as dist

    from mrl import platform

    platform.install()
    from mrl.parallel import Meshes
    from mrl.weights.convert.convert import ConvertOptions, hf_to_megatron, megatron_to_hf

    platform.init_process_group(TIMEOUT_S)
    convert = hf_to_megatron if direction == "hf-to-megatron" else megatron_to_hf
    meshes = Meshes()
    platform.reset_peak_memory()
    before = platform.peak_memory_bytes()
    report = convert(
        Path(source), Path(target), ConvertOptions(workers=int(workers), max_file_bytes=SHARD_BYTES), meshes
    )
    peak = platform.peak_memory_bytes()
    if peak - before > GROWTH_LIMIT:
        sys.exit(f"{direction}: resident memory grew by {(peak - before) / 1e6:.0f} MB")
    print(json.dumps({"gb_per_s": report.nbytes / 1e9 / report.seconds, "seconds": report.seconds,
                      "rss_before_mb": before / 1e6, "rss_peak_mb": peak / 1e6}))  # fmt: skip
    dist.destroy_process_group()


def run_round(work: Path, ram: Path, nbytes: int, workers: int) -> dict[str, Any]:
    model, megatron, back = work / "model", work / "megatron", work / "back"
    result: dict[str, Any] = {"read": plain_read(model)}
    for place, to in (("", work), (" to memory", ram)):
        result[f"write{place}"] = plain_write(to, nbytes, workers)
        result[f"copy{place}"] = plain_copy(model, to, workers)
    result["hf-to-megatron"] = conversion("hf-to-megatron", model, megatron, workers)
    result["read_megatron"] = plain_read(megatron)
    result["megatron-to-hf"] = conversion("megatron-to-hf", megatron, back, workers)
    for direction, source in (("hf-to-megatron", model), ("megatron-to-hf", megatron)):
        result[f"{direction} to memory"] = conversion(direction, source, ram / "target", workers)
        shutil.rmtree(ram / "target")
    same_bytes = all((back / file.name).read_bytes() == file.read_bytes() for file in model.glob("*.safetensors"))
    shutil.rmtree(megatron)
    shutil.rmtree(back)
    return {**result, "same_bytes": same_bytes}


def summary(rounds: list[dict[str, Any]]) -> dict[str, Any]:
    """Returns the best rates over the rounds, since noise only slows down, and their ratios to plain read and copy."""
    best = {name: max(entry[name] for entry in rounds) for name, rate in rounds[0].items() if isinstance(rate, float)}
    for name in [key for key in rounds[0] if key.startswith(("hf-to", "megatron-to"))]:
        read = best["read" if name.startswith("hf") else "read_megatron"]
        rate = max(entry[name]["gb_per_s"] for entry in rounds)
        best[name] = {
            "gb_per_s": rate,
            "of_plain_read": rate / read,
            "of_plain_copy": rate / best["copy to memory" if name.endswith("memory") else "copy"],
            "rss_peak_mb": max(entry[name]["rss_peak_mb"] for entry in rounds),
            "rss_grown_mb": max(entry[name]["rss_peak_mb"] - entry[name]["rss_before_mb"] for entry in rounds),
        }
    return best


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gb", type=float, default=2.0, help="size of the model")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--workers", type=int, default=4, help="threads")
    parser.add_argument("--folder", type=Path, default=Path("/tmp"), help="a folder on the disk")
    parser.add_argument("--ram", type=Path, default=Path("/dev/shm"), help="a folder in memory")
    parser.add_argument("--out", type=Path, default=record.RESULTS / "convert.json")
    args = parser.parse_args()
    with (
        tempfile.TemporaryDirectory(dir=args.folder, prefix="bench_convert_") as work,
        tempfile.TemporaryDirectory(dir=args.ram, prefix="bench_convert_") as ram,
    ):
        make_model(Path(work) / "model", int(args.gb * 1e9))
        nbytes = sum(file.stat().st_size for file in (Path(work) / "model").glob("*.safetensors"))
        rounds = []
        for _ in range(args.rounds):
            rounds.append(run_round(Path(work), Path(ram), nbytes, args.workers))
            print(json.dumps(rounds[-1], indent=1), flush=True)
    result = {
        "model_gb": nbytes / 1e9, "shard_gb": SHARD_BYTES / 1e9, "buffer_mb": BUFFER_BYTES / 1e6,
        "growth_limit_gb": GROWTH_LIMIT / 1e9, "workers": args.workers, "best": summary(rounds), "rounds": rounds,
    }  # fmt: skip
    record.write(args.out, result)
    print(json.dumps(result["best"], indent=1))


if __name__ == "__main__":
    child(*sys.argv[2:]) if sys.argv[1:2] == ["--child"] else main()
