"""Trains SmolLM2-135M-Instruct on arithmetic by GRPO, with SGLang on the trainer's GPU.

Runs only if named. `python tools/make_reasoning_task.py runs/quickstart_real_task` downloads the model.
"""

from __future__ import annotations

from tools.gpu.stage import ROOT, Failed, Numbers, Setting, Skipped, require
from tools.gpu.stage_engine import LAYERS, NOTHING_RELEASED, ROUNDED_NATS, engine_overrides, has_sglang
from tools.gpu.trained import ALONE, rollout_numbers, train

MODEL = ROOT / "runs" / "quickstart_real_task" / "model"
RUN_S = 180.0
REWARD_RISE = 0.2  # minimum rise of the training reward in 30 steps; on a CPU in float32 it is 0.6


def grpo(setting: Setting) -> Numbers:
    if not has_sglang():
        raise Skipped("sglang is not installed")
    if not (MODEL / "config.json").is_file():
        raise Skipped(f"the model is not made: python tools/make_reasoning_task.py {MODEL.parent.relative_to(ROOT)}")
    overrides = [*ALONE, "model.dtype=bfloat16", LAYERS, *NOTHING_RELEASED, *engine_overrides(True)]
    overrides += ["checkpoint.every_steps=null", "checkpoint.export_hf=false"]
    overrides += ["rollout.servers=1", "rollout.memory_fraction=0.3"]
    rows = train(setting, "real", "quickstart_real", overrides, RUN_S)
    numbers = rollout_numbers(rows) | {
        "rewards": [round(row["reward/mean"], 3) for row in rows],
        "held out": {row["step"]: row["validation/right"] for row in rows if "validation/right" in row},
    }
    if not numbers["last reward"] > numbers["first reward"] + REWARD_RISE:
        raise Failed(f"the reward rose by less than {REWARD_RISE}", numbers)
    return require(numbers, mismatch_mean=ROUNDED_NATS)


CHECKS = {"GRPO of SmolLM2-135M-Instruct by SGLang": grpo}
