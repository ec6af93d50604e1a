"""TRL's side of `grpo_vs_trl.py`: GRPOTrainer on the workload. Needs TRL; prints one JSON line.

    python trl_grpo.py WORKLOAD_DIRECTORY SHAPE STEPS THREADS [--gradient-checkpointing] [--bf16]

Rollout is generation and scoring. Training is the rest of a step: padding, advantages, forward, backward, optimizer,
the Trainer's bookkeeping.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import transformers
import trl
import workload
from datasets import load_dataset
from transformers import TrainerCallback
from trl import GRPOConfig, GRPOTrainer


class TimedTrainer(GRPOTrainer):
    """Adds up the seconds of rollouts, and collects the lengths of the responses."""

    rollout_s = 0.0
    lengths: list[int] = []

    def _generate(self, *args: Any, **kwargs: Any) -> Any:
        began = time.perf_counter()
        out = super()._generate(*args, **kwargs)
        TimedTrainer.rollout_s += time.perf_counter() - began
        self.lengths.extend(len(ids) for ids in out[1])
        return out

    def _calculate_rewards(self, *args: Any, **kwargs: Any) -> Any:
        began = time.perf_counter()
        out = super()._calculate_rewards(*args, **kwargs)
        TimedTrainer.rollout_s += time.perf_counter() - began
        return out


class Clock(TrainerCallback):
    """Times each step from the end of the step before, so that the whole loop counts."""

    def __init__(self) -> None:
        self.rows: list[dict[str, float]] = []
        self.last = time.perf_counter()

    def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
        self.last = time.perf_counter()

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        now = time.perf_counter()
        step, rollout = now - self.last, TimedTrainer.rollout_s
        self.rows.append({"rollout": rollout, "training": step - rollout, "step": step})
        TimedTrainer.rollout_s, self.last = 0.0, now


def share_of_digits(completions: list[str], **unused: Any) -> list[float]:
    return [workload.share_of_digits("", text, {}) for text in completions]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("directory", type=Path)
    parser.add_argument("shape", choices=sorted(workload.SHAPES))
    parser.add_argument("steps", type=int)
    parser.add_argument("threads", type=int)
    parser.add_argument("--gradient-checkpointing", action="store_true")
    parser.add_argument("--bf16", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    shape = workload.SHAPES[args.shape]
    clock = Clock()
    with tempfile.TemporaryDirectory() as scratch:
        config = GRPOConfig(
            output_dir=scratch,
            use_cpu=True,
            bf16=args.bf16,
            model_init_kwargs={"dtype": "float32"},
            per_device_train_batch_size=shape.microbatch,
            gradient_accumulation_steps=-(-shape.samples // shape.microbatch),
            num_generations=workload.SAMPLES_PER_PROMPT,
            max_completion_length=shape.new_tokens,
            num_iterations=1,
            beta=0.0,
            learning_rate=workload.LEARNING_RATE,
            lr_scheduler_type="constant",
            max_steps=args.steps,
            gradient_checkpointing=args.gradient_checkpointing,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
        )
        trainer = TimedTrainer(
            model=str(args.directory / "model"),
            reward_funcs=share_of_digits,
            args=config,
            train_dataset=load_dataset("json", data_files=str(args.directory / "train.jsonl"), split="train"),
            callbacks=[clock],
        )
        before = [p.detach().clone() for p in trainer.model.parameters()]
        trainer.train()
    lengths = trainer.lengths
    if not shape.has_expected_lengths(lengths) or len(lengths) != shape.samples * args.steps:
        expected = args.steps * shape.samples
        sys.exit(f"{len(lengths)} responses of {min(lengths)} to {max(lengths)} tokens, {expected} expected")
    for step, row in enumerate(clock.rows):
        row["tokens"] = sum(lengths[step * shape.samples : (step + 1) * shape.samples]) / shape.samples
    if all(torch.equal(a, b) for a, b in zip(before, trainer.model.parameters())):
        sys.exit("training changed no weight")
    versions = {"trl": trl.__version__, "torch": torch.__version__, "transformers": transformers.__version__}
    print("RESULT " + json.dumps({"versions": versions, "rows": clock.rows}))


if __name__ == "__main__":
    main()
