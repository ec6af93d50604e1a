"""TRL's side of `sft_vs_trl.py`. Needs TRL; prints one JSON line.

    python trl_sft.py WORKLOAD_DIRECTORY even|uneven STEPS THREADS

Rows of even lengths are packed (best fit decreasing), uneven ones padded, as TRL's users do. A micro-batch has one pack
or a few padded rows: on a CPU, TRL is then several times as fast as with a step's rows at once, where attention covers
all pairs of tokens.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import preference_workload as workload
import sft_workload as rows
import torch
import transformers
import trl
from datasets import load_dataset
from trl_preference import Clock, common, train_and_print


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("directory", type=Path)
    parser.add_argument("lengths", choices=["even", "uneven"])
    parser.add_argument("steps", type=int)
    parser.add_argument("threads", type=int)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    clock = Clock()
    is_packed = args.lengths == "even"
    with tempfile.TemporaryDirectory() as scratch:
        settings = common(scratch, args.steps) | {"packing": is_packed}
        batch = 1 if is_packed else rows.PADDED_ROWS
        parts = rows.ROWS_PER_STEP // (rows.ROWS_PER_PACK if is_packed else rows.PADDED_ROWS)
        settings |= {"per_device_train_batch_size": batch, "gradient_accumulation_steps": parts}
        settings["shuffle_dataset"] = False
        settings["max_length"] = rows.PACK_TOKENS if is_packed else workload.MODEL["max_position_embeddings"]
        trainer = trl.SFTTrainer(
            model=str(args.directory / "model"),
            args=trl.SFTConfig(**settings),
            train_dataset=load_dataset("json", data_files=str(rows.file(args.directory, args.lengths)), split="train"),
            processing_class=transformers.AutoTokenizer.from_pretrained(args.directory / "model"),
            callbacks=[clock],
        )
        train_and_print(trainer, clock)


if __name__ == "__main__":
    main()
