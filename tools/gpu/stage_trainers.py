"""The other trainers: a few steps of their quickstarts, one process each, several at once on the same GPU."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cache
from pathlib import Path

from tools.gpu.stage import ROOT, Check, Failed, Numbers, Setting, require
from tools.gpu.trained import (
    ALONE,
    Row,
    data_overrides,
    environment,
    rollout_numbers,
    task,
    train,
    training_numbers,
    with_weights,
)

RUN_S = 110.0
MAKE_S = 90.0
AT_ONCE = 4
TINY, DENSE, EXPERTS = SIZES = (None, "sort-20m", "sort-glm4-moe")
UNSHARDED = ("actor.parallel={tensor: 1, pipeline: 1}",)
FEW_PROMPTS = "validation.prompts=16"
BFLOAT16 = "model.dtype=bfloat16"  # by transformer-engine's layers where it is installed
OWN_ENGINE = ("rollout.engine=transformers", "sync.verify=checksum", "validation.at_start=false")
ROUNDED_NATS, EXACT_NATS = 0.05, 1e-3  # bounds of the mean difference of a token's log-prob


def scratch_overrides(model: Path) -> list[str]:
    return [f"model.path={model}", "model.from_scratch=true", "checkpoint.export_hf=false"]


def dpo(setting: Setting) -> Numbers:
    task_dir = task(setting, DENSE)
    overrides = [*UNSHARDED, *scratch_overrides(task_dir / "model_init"), f"data.train={task_dir}/data/pairs.jsonl"]
    overrides += [BFLOAT16, "ref.policy=frozen", "run.steps=8"]
    return check_loss_fell(run_steps(setting, "dpo", overrides))


def reward_model(setting: Setting) -> Numbers:
    task_dir = task(setting, TINY)
    overrides = [*UNSHARDED, *scratch_overrides(task_dir / "model_init"), "run.steps=8"]
    overrides += [f"data.train={task_dir}/data/pairs.jsonl", f"data.validation={task_dir}/data/pairs_validation.jsonl"]
    return training_numbers(run_steps(setting, "reward_model", overrides))


def lora(setting: Setting) -> Numbers:
    """PPO with LoRA adapters in policy and critic; weight syncs send merged weights."""
    overrides = [*UNSHARDED, "critic.parallel={tensor: 1}", f"model.path={model_with_weights(setting)}", BFLOAT16]
    overrides += [*data_overrides(task(setting, DENSE)), FEW_PROMPTS, *OWN_ENGINE, "sync.lora=merge"]
    overrides += ["checkpoint.export_hf=false", "critic.warmup_steps=1", "batch.prompts_per_step=64", "run.steps=4"]
    rows = run_steps(setting, "lora_ppo", overrides)
    return check_mismatch(rows[1:], ROUNDED_NATS)  # the first step only trains the critic


def mixture_of_experts(setting: Setting) -> Numbers:
    task_dir = task(setting, EXPERTS)
    overrides = ["actor.parallel={tensor: 1, pipeline: 1, context: 1, expert: 1}", BFLOAT16]
    overrides += [*scratch_overrides(task_dir / "model_init"), *data_overrides(task_dir), FEW_PROMPTS, *OWN_ENGINE]
    overrides += ["reward.function=sorted_digits", "batch.prompts_per_step=64", "run.steps=4"]
    return check_mismatch(run_steps(setting, "glm4_moe", overrides), ROUNDED_NATS)


def vision(setting: Setting) -> Numbers:
    task_dir = run_tool(setting, "make_count_task", "--pictures", "64", "--until", "0")
    overrides = [*UNSHARDED, f"model.path={task_dir}/model", *data_overrides(task_dir), *OWN_ENGINE, FEW_PROMPTS]
    overrides += ["batch.prompts_per_step=16", "run.steps=4"]
    return check_mismatch(run_steps(setting, "vl_grpo", overrides), EXACT_NATS)


def agent(setting: Setting) -> Numbers:
    task_dir = run_tool(setting, "make_guess_task")
    overrides = [*UNSHARDED, f"model.path={task_dir}/model_init", *OWN_ENGINE, "run.steps=4"]
    overrides += [f"data.{kind}={task_dir}/{kind}.jsonl" for kind in ("train", "validation")]
    return check_mismatch(run_steps(setting, "agent", overrides), EXACT_NATS)


def diffusion(setting: Setting) -> Numbers:
    """Trains a denoiser from random weights by SFT, then its export by DDPO."""
    task_dir = run_tool(setting, "make_shapes_task")
    overrides = [f"model.path={task_dir}/model_init", f"data.train={task_dir}/pictures.jsonl", "run.steps=60"]
    sft = run_steps(setting, "ddpo_sft", [*overrides, "actor.optimizer.warmup_steps=10"])
    overrides = [f"model.path={setting.work}/runs/ddpo_sft/hf", f"data.train={task_dir}/prompts.jsonl", "run.steps=4"]
    ddpo = run_steps(setting, "ddpo", overrides)
    return {f"SFT: {name}": value for name, value in check_loss_fell(sft).items()} | training_numbers(ddpo)


def model_with_weights(setting: Setting) -> Path:
    """Returns the directory of a model for adapters, which need base weights on disk."""
    return with_weights(task(setting, DENSE) / "model_init", setting.work / "dense model")


def run_steps(setting: Setting, name: str, overrides: Sequence[str]) -> list[Row]:
    return train(setting, name, f"quickstart_{name}", [*ALONE, *overrides], RUN_S)


def check_mismatch(rows: Sequence[Row], nats: float) -> Numbers:
    """Raises Failed if log-probs of engine and trainer differ by more than `nats` in the mean of a step."""
    return require(rollout_numbers(rows), mismatch_mean=nats)


def run_tool(setting: Setting, tool: str, *args: str) -> Path:
    """Runs tools/TOOL.py and returns its output directory. Raises Failed with the end of its stderr."""
    out = setting.work / tool
    command = [sys.executable, f"tools/{tool}.py", str(out), *args]
    try:
        done = subprocess.run(command, cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=MAKE_S)
    except subprocess.TimeoutExpired:
        raise Failed(f"{tool} did not end within {MAKE_S:g} s") from None
    if done.returncode:
        raise Failed(f"{tool} ended with exit code {done.returncode}: {done.stderr.strip()[-500:]}")
    return out


def check_loss_fell(rows: Sequence[Row]) -> Numbers:
    numbers = training_numbers(rows)
    if not numbers["last loss"] < numbers["first loss"]:
        raise Failed("the loss did not fall", numbers)
    return numbers


RUNS: Mapping[str, Check] = {
    "DPO, bfloat16": dpo,
    "a reward model": reward_model,
    "PPO, bfloat16, adapters": lora,
    "GRPO, bfloat16, GLM's experts": mixture_of_experts,
    "GRPO of a model that sees pictures": vision,
    "GRPO of an agent of several turns": agent,
    "diffusion: SFT and DDPO": diffusion,
}


@cache
def start_all(setting: Setting) -> dict[str, Future[Numbers]]:
    for sizes in SIZES:
        task(setting, sizes)
    model_with_weights(setting)
    pool = ThreadPoolExecutor(AT_ONCE)
    return {name: pool.submit(run, setting) for name, run in RUNS.items()}


def result(name: str) -> Check:
    return lambda setting: start_all(setting)[name].result()


CHECKS: dict[str, Check] = {name: result(name) for name in RUNS}
