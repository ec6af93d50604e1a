"""TRL's side of `preference_vs_trl.py`. Needs TRL; prints one JSON line.

python trl_preference.py WORKLOAD_DIRECTORY TRAINER even|uneven STEPS THREADS [--cached]
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import preference_workload as workload
import torch
import transformers
import trl
from datasets import load_dataset
from transformers import TrainerCallback

Row = dict[str, float]


class Clock(TrainerCallback):
    """Measures each step's wall seconds, and processor seconds of all threads, from the end of the step before."""

    def __init__(self) -> None:
        self.rows: list[Row] = []
        self.last = (0.0, 0.0)

    def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
        self.last = (time.perf_counter(), time.process_time())

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        now = (time.perf_counter(), time.process_time())
        self.rows.append({"seconds": now[0] - self.last[0], "processor": now[1] - self.last[1]})
        self.last = now


def common(scratch: str, steps: int) -> dict[str, Any]:
    """Returns settings common to all runs: float32, no gradient checkpointing, rows in the file's order."""
    return {
        "output_dir": scratch,
        "use_cpu": True,
        "bf16": False,
        "gradient_checkpointing": False,
        "per_device_train_batch_size": workload.PAIRS_PER_STEP,
        "gradient_accumulation_steps": 1,
        "learning_rate": workload.LEARNING_RATE,
        "lr_scheduler_type": "constant",
        "max_steps": steps,
        "max_length": workload.MODEL["max_position_embeddings"],
        "train_sampling_strategy": "sequential",
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "logging_steps": 1,
        "model_init_kwargs": {"dtype": "float32"},
    }


def dpo(args: argparse.Namespace, settings: dict[str, Any]) -> tuple[type, Any]:
    """Returns the trainer's class and its arguments."""
    config = trl.DPOConfig(**settings, beta=workload.BETA, precompute_ref_log_probs=args.cached)
    return trl.DPOTrainer, config


def reward(args: argparse.Namespace, settings: dict[str, Any]) -> tuple[type, Any]:
    """Returns the trainer's class and its arguments."""
    return trl.RewardTrainer, trl.RewardConfig(**settings, center_rewards_coefficient=workload.CENTRING)


TRAINERS = {"dpo": dpo, "reward": reward}
MODELS = {"dpo": "model", "reward": "judge"}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("directory", type=Path)
    parser.add_argument("trainer", choices=sorted(TRAINERS))
    parser.add_argument("lengths", choices=["even", "uneven"])
    parser.add_argument("steps", type=int)
    parser.add_argument("threads", type=int)
    parser.add_argument("--cached", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    clock = Clock()
    with tempfile.TemporaryDirectory() as scratch:
        trainer_class, config = TRAINERS[args.trainer](args, common(scratch, args.steps))
        trainer = trainer_class(
            model=str(args.directory / MODELS[args.trainer]),
            args=config,
            train_dataset=load_dataset("json", data_files=str(args.directory / f"{args.lengths}.jsonl"), split="train"),
            processing_class=transformers.AutoTokenizer.from_pretrained(args.directory / "model"),
            callbacks=[clock],
        )
        train_and_print(trainer, clock)


def train_and_print(trainer: Any, clock: Clock) -> None:
    """Trains, and prints a line with versions, times and losses."""
    before = [p.detach().clone() for p in trainer.model.parameters()]
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    if all(torch.equal(a, b) for a, b in zip(before, trainer.model.parameters())):
        sys.exit("training changed no weight")
    versions = {"trl": trl.__version__, "torch": torch.__version__, "transformers": transformers.__version__}
    print("RESULT " + json.dumps({"versions": versions, "rows": clock.rows, "losses": losses}))


if __name__ == "__main__":
    main()
