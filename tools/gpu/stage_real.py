"""A pretrained model, SmolLM2-135M-Instruct, learns arithmetic by GRPO with SGLang on the trainer's GPU.

Runs only if named. `python tools/make_reasoning_task.py runs/quickstart_real_task` makes the model, with a network.
"""

from __future__ import annotations

from tools.gpu.stage import ROOT, Failed, Numbers, Setting, Skipped, require
from tools.gpu.stage_engine import LAYERS, NOTHING_GIVEN_UP, ROUNDED_NATS, engine, has_sglang
from tools.gpu.trained import ALONE, sampled, train

MODEL = ROOT / "runs" / "quickstart_real_task" / "model"
RUN_S = 180.0
LEARNT = 0.2  # rise of the training reward in 30 steps; on a CPU in float32 it is 0.6


def grpo(setting: Setting) -> Numbers:
    if not has_sglang():
        raise Skipped("sglang is not installed")
    if not (MODEL / "config.json").is_file():
        raise Skipped(f"the model is not made: python tools/make_reasoning_task.py {MODEL.parent.relative_to(ROOT)}")
    words = [*ALONE, "model.dtype=bfloat16", LAYERS, *NOTHING_GIVEN_UP, *engine(True), "checkpoint.every_steps=null"]
    own = ["rollout.servers=1", "rollout.memory_fraction=0.3", "checkpoint.export_hf=false"]
    rows = train(setting, "real", "quickstart_real", [*words, *own], RUN_S)
    numbers = sampled(rows) | {
        "rewards": [round(row["reward/mean"], 3) for row in rows],
        "held out": {row["step"]: row["validation/right"] for row in rows if "validation/right" in row},
    }
    if not numbers["last reward"] > numbers["first reward"] + LEARNT:
        raise Failed("the reward has not risen", numbers)
    return require(numbers, mismatch_mean=ROUNDED_NATS)


CHECKS = {"GRPO of SmolLM2-135M-Instruct by SGLang": grpo}
