"""The other trainers: some steps of their quickstarts by one process each, several at once on the same GPU."""

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
    environment,
    learnt,
    of_data,
    sampled,
    task,
    train,
    with_weights,
)

RUN_S = 110.0
MAKE_S = 90.0
AT_ONCE = 4
TINY, DENSE, EXPERTS = SIZES = (None, "sort-20m", "sort-glm4-moe")
UNCUT = ("actor.parallel={tensor: 1, pipeline: 1}",)
FEW = "validation.prompts=16"
BFLOAT16 = "model.dtype=bfloat16"  # by transformer-engine's layers where it is
OWN_ENGINE = ("rollout.engine=transformers", "sync.verify=checksum", "validation.at_start=false")
ROUNDED_NATS, EXACT_NATS = 0.05, 1e-3  # of a token's log-prob, in the mean


def scratch(model: Path) -> list[str]:
    return [f"model.path={model}", "model.from_scratch=true", "checkpoint.export_hf=false"]


def dpo(setting: Setting) -> Numbers:
    made = task(setting, DENSE)
    words = [*UNCUT, *scratch(made / "model_init"), f"data.train={made}/data/pairs.jsonl", BFLOAT16]
    return descended(steps(setting, "dpo", [*words, "ref.policy=frozen", "run.steps=8"]))


def reward_model(setting: Setting) -> Numbers:
    made = task(setting, TINY)
    rows = [f"data.{kind}={made}/data/pairs{end}.jsonl" for kind, end in (("train", ""), ("validation", "_validation"))]
    return learnt(steps(setting, "reward_model", [*UNCUT, *scratch(made / "model_init"), *rows, "run.steps=8"]))


def adapters(setting: Setting) -> Numbers:
    """PPO of a policy and a critic that learn by adapters alone, which are merged into what is pushed."""
    made = task(setting, DENSE)
    words = [*UNCUT, "critic.parallel={tensor: 1}", f"model.path={filled(setting)}", *of_data(made), FEW, BFLOAT16]
    words += ["sync.lora=merge", "checkpoint.export_hf=false", "critic.warmup_steps=1"]
    own = ["batch.prompts_per_step=64", "run.steps=4"]
    rows = steps(setting, "lora_ppo", [*words, *OWN_ENGINE, *own])
    return near(rows[1:], ROUNDED_NATS)  # the first one warms the critic up


def experts(setting: Setting) -> Numbers:
    made = task(setting, EXPERTS)
    words = ["actor.parallel={tensor: 1, pipeline: 1, context: 1, expert: 1}", *scratch(made / "model_init")]
    own = [BFLOAT16, "reward.function=sorted_digits", "batch.prompts_per_step=64", "run.steps=4"]
    return near(steps(setting, "glm4_moe", [*words, *of_data(made), FEW, *OWN_ENGINE, *own]), ROUNDED_NATS)


def pictures(setting: Setting) -> Numbers:
    made = of_tool(setting, "make_count_task", "--pictures", "64", "--until", "0")
    words = [*UNCUT, f"model.path={made}/model", *of_data(made), *OWN_ENGINE]
    own = [FEW, "batch.prompts_per_step=16", "run.steps=4"]
    return near(steps(setting, "vl_grpo", [*words, *own]), EXACT_NATS)


def agent(setting: Setting) -> Numbers:
    made = of_tool(setting, "make_guess_task")
    rows = [f"data.{kind}={made}/{kind}.jsonl" for kind in ("train", "validation")]
    words = [*UNCUT, f"model.path={made}/model_init", *rows, *OWN_ENGINE, "run.steps=4"]
    return near(steps(setting, "agent", words), EXACT_NATS)


def diffusion(setting: Setting) -> Numbers:
    """Denoising from random weights, and DDPO from there."""
    made = of_tool(setting, "make_shapes_task")
    words = [f"model.path={made}/model_init", f"data.train={made}/pictures.jsonl", "run.steps=60"]
    first = steps(setting, "ddpo_sft", [*words, "actor.optimizer.warmup_steps=10"])
    left = setting.work / "runs" / "ddpo_sft" / "hf"
    rows = steps(setting, "ddpo", [f"model.path={left}", f"data.train={made}/prompts.jsonl", "run.steps=4"])
    return {f"SFT: {name}": value for name, value in descended(first).items()} | learnt(rows)


def filled(setting: Setting) -> Path:
    """A model for adapters, which belong to weights on disk."""
    return with_weights(task(setting, DENSE) / "model_init", setting.work / "dense model")


def steps(setting: Setting, name: str, words: Sequence[str]) -> list[Row]:
    return train(setting, name, f"quickstart_{name}", [*ALONE, *words], RUN_S)


def near(rows: Sequence[Row], nats: float) -> Numbers:
    """Failed where the engine's log-probs are apart from the trainer's by more than that in a step's mean."""
    return require(sampled(rows), mismatch_mean=nats)


def of_tool(setting: Setting, tool: str, *words: str) -> Path:
    """What a tool makes, in a directory. Raises Failed with its last words."""
    out = setting.work / tool
    command = [sys.executable, f"tools/{tool}.py", str(out), *words]
    try:
        done = subprocess.run(command, cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=MAKE_S)
    except subprocess.TimeoutExpired:
        raise Failed(f"{tool} did not end within {MAKE_S:g} s") from None
    if done.returncode:
        raise Failed(f"{tool} ended with exit code {done.returncode}: {done.stderr.strip()[-500:]}")
    return out


def descended(rows: Sequence[Row]) -> Numbers:
    numbers = learnt(rows)
    if not numbers["last loss"] < numbers["first loss"]:
        raise Failed("the loss did not fall", numbers)
    return numbers


RUNS: Mapping[str, Check] = {
    "DPO, bfloat16": dpo,
    "a reward model": reward_model,
    "PPO, bfloat16, adapters": adapters,
    "GRPO, bfloat16, GLM's experts": experts,
    "GRPO of a model that sees pictures": pictures,
    "GRPO of an agent of several turns": agent,
    "diffusion: SFT and DDPO": diffusion,
}


@cache
def begun(setting: Setting) -> dict[str, Future[Numbers]]:
    for sizes in SIZES:
        task(setting, sizes)
    filled(setting)
    pool = ThreadPoolExecutor(AT_ONCE)
    return {name: pool.submit(run, setting) for name, run in RUNS.items()}


def result(name: str) -> Check:
    return lambda setting: begun(setting)[name].result()


CHECKS: dict[str, Check] = {name: result(name) for name in RUNS}
