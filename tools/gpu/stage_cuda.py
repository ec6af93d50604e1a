"""CUDA without transformer-engine and SGLang: parity of every family, runs of three trainers, resume."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from tools.gpu.parity import CPU, FAMILIES, GPU, LOCAL, parity, processes, same_bits
from tools.gpu.stage import Failed, Numbers, Setting, require
from tools.gpu.trained import ALONE, ONE_RANK, Row, data_overrides, rollout_numbers, task, train, training_numbers

RUN_S = 100.0
UNSHARDED = ("tensor=1", "pipeline=1", "context=1")
RESUME_ERROR = 1e-4  # relative, of losses and gradient norms of the same steps in float32: sums have no fixed order
EXACT_NATS = 1e-3  # bound of the difference of a token's log-prob, both sides in float32


def sft(setting: Setting) -> Numbers:
    overrides = [*sft_overrides(task(setting)), "run.steps=40", "actor.optimizer.warmup_steps=5"]
    overrides += ["checkpoint.export_hf=true"]
    numbers = training_numbers(train(setting, "sft", "quickstart_sft", overrides, RUN_S))
    return require(numbers | {"of the first": numbers["last loss"] / numbers["first loss"]}, **{"of the first": 0.9})


def sft_overrides(task_dir: Path) -> list[str]:
    return [*ALONE, *(f"actor.parallel.{part}" for part in UNSHARDED), f"model.path={task_dir}/model_init",
            f"data.train={task_dir}/data/train.jsonl"]  # fmt: skip


def grpo(setting: Setting) -> Numbers:
    return checked(train(setting, "grpo", "quickstart_grpo", [*rl_overrides(setting, "actor"), "run.steps=8"], RUN_S))


def ppo(setting: Setting) -> Numbers:
    overrides = [*rl_overrides(setting, "actor", "critic"), "critic.warmup_steps=1", "run.steps=8"]
    rows = train(setting, "ppo", "quickstart_ppo", overrides, RUN_S)
    return checked(rows[1:]) | {"critic loss": rows[-1]["critic/loss"]}


def rl_overrides(setting: Setting, *models: str) -> list[str]:
    """Starts from the weights that the run of `sft` exported, or from random weights without that export."""
    layout = [f"{model}.parallel.{part}" for model in models for part in UNSHARDED]
    start = start_overrides(task(setting), setting.work / "runs" / "sft" / "hf")
    return [*ONE_RANK, *layout, *start, "rollout.engine=transformers", "sync.verify=checksum",
            "batch.prompts_per_step=64", "validation.prompts=64"]  # fmt: skip


def start_overrides(task_dir: Path, exported: Path) -> list[str]:
    """Returns the task's data, and `exported` as the model if it exists, else the task's with random weights."""
    if (exported / "config.json").is_file():
        return [f"model.path={exported}", "model.from_scratch=false", *data_overrides(task_dir)]
    return [f"model.path={task_dir}/model_init", "model.from_scratch=true", *data_overrides(task_dir)]


def checked(rows: Sequence[Row]) -> Numbers:
    return require(rollout_numbers(rows), mismatch_max=EXACT_NATS)


def resume(setting: Setting) -> Numbers:
    """Compares six steps of one process with three steps and three more by another process."""
    overrides = [*sft_overrides(task(setting)), "checkpoint.every_steps=3", "checkpoint.export_hf=false"]

    def steps(name: str, count: int) -> list[Row]:
        return train(setting, name, "quickstart_sft", [*overrides, f"run.steps={count}"], RUN_S)

    whole = steps("whole", 6)
    steps("in two", 3)
    again = steps("in two", 6)
    return same_losses(whole[3:], again[-3:], RESUME_ERROR)


def same_losses(some: Sequence[Row], others: Sequence[Row], bound: float) -> Numbers:
    """Raises Failed if losses or gradient norms of the same steps differ by more than the bound, relative."""
    if [row["step"] for row in some] != [row["step"] for row in others]:
        raise Failed(f"the steps differ: {[row['step'] for row in some]} and {[row['step'] for row in others]}")
    pairs = [(a[name], b[name]) for a, b in zip(some, others) for name in ("actor/loss", "actor/grad_norm")]
    error = max(abs(a - b) / abs(a) for a, b in pairs)
    return require({"apart": error, "equal": all(a == b for a, b in pairs)}, apart=bound)


CHECKS = {
    "processes of the next checks": processes(FAMILIES, [CPU, GPU, LOCAL]),
    **{f"float32 is the CPU's: {family}": parity(family, GPU) for family in FAMILIES},
    **{f"bfloat16 is near, local layers: {family}": parity(family, LOCAL) for family in FAMILIES},
    "the same bits again with run.deterministic": same_bits,
    "SFT, float32": sft,
    "GRPO, float32, transformers engine": grpo,
    "PPO, float32, transformers engine": ppo,
    "resume": resume,
}
