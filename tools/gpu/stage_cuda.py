"""CUDA without transformer-engine and without SGLang: parity of every family, three trainers' runs, resume."""

from __future__ import annotations

from collections.abc import Sequence

from tools.gpu.parity import CPU, FAMILIES, GPU, LOCAL, parity, processes, same_bits
from tools.gpu.stage import Failed, Numbers, Setting, require
from tools.gpu.trained import ONE_RANK, Row, learnt, of_data, sampled, task, train

RUN_S = 100.0
NOT_CUT = ("tensor=1", "pipeline=1", "context=1")
RESUMED = 1e-4  # losses and gradient norms of the same steps in float32, relative: sums have no fixed order
EXACT_NATS = 1e-3  # of a token's log-prob, both sides in float32


def sft(setting: Setting) -> Numbers:
    made = task(setting)
    words = [*of_sft(made), "run.steps=40", "actor.optimizer.warmup_steps=5", "checkpoint.export_hf=true"]
    numbers = learnt(train(setting, "sft", "quickstart_sft", words, RUN_S))
    return require(numbers | {"of the first": numbers["last loss"] / numbers["first loss"]}, **{"of the first": 0.9})


def of_sft(made: object) -> list[str]:
    own = [word for word in ONE_RANK if not word.startswith("validation")]
    return [*own, *(f"actor.parallel.{part}" for part in NOT_CUT), f"model.path={made}/model_init",
            f"data.train={made}/data/train.jsonl"]  # fmt: skip


def grpo(setting: Setting) -> Numbers:
    return judged(train(setting, "grpo", "quickstart_grpo", [*of_rl(setting, "actor"), "run.steps=8"], RUN_S))


def ppo(setting: Setting) -> Numbers:
    words = [*of_rl(setting, "actor", "critic"), "critic.warmup_steps=1", "run.steps=8"]
    rows = train(setting, "ppo", "quickstart_ppo", words, RUN_S)
    return judged(rows[1:]) | {"critic loss": rows[-1]["critic/loss"]}


def of_rl(setting: Setting, *models: str) -> list[str]:
    """From the weights that the run by sft has left, if it has."""
    made, left = task(setting), setting.work / "runs" / "sft" / "hf"
    scratch = not (left / "config.json").is_file()
    layout = [f"{model}.parallel.{part}" for model in models for part in NOT_CUT]
    own = [f"model.path={made / 'model_init' if scratch else left}", f"model.from_scratch={str(scratch).lower()}"]
    return [*ONE_RANK, *layout, *own, *of_data(made), "rollout.engine=transformers", "sync.verify=checksum",
            "batch.prompts_per_step=64", "validation.prompts=64"]  # fmt: skip


def judged(rows: Sequence[Row]) -> Numbers:
    return require(sampled(rows), mismatch_max=EXACT_NATS)


def resume(setting: Setting) -> Numbers:
    """Six steps, and three with three more by another process."""
    words = [*of_sft(task(setting)), "checkpoint.every_steps=3", "checkpoint.export_hf=false"]

    def steps(name: str, count: int) -> list[Row]:
        return train(setting, name, "quickstart_sft", [*words, f"run.steps={count}"], RUN_S)

    whole = steps("whole", 6)
    steps("in two", 3)
    again = steps("in two", 6)
    return same_losses(whole[3:], again[-3:], RESUMED)


def same_losses(some: Sequence[Row], others: Sequence[Row], bound: float) -> Numbers:
    """Failed where losses or gradients of the same steps differ by more than the bound, relative."""
    if [row["step"] for row in some] != [row["step"] for row in others]:
        raise Failed(f"steps {[row['step'] for row in some]} against {[row['step'] for row in others]}")
    pairs = [(a[name], b[name]) for a, b in zip(some, others) for name in ("actor/loss", "actor/grad_norm")]
    apart = max(abs(a - b) / abs(a) for a, b in pairs)
    return require({"apart": apart, "equal": all(a == b for a, b in pairs)}, apart=bound)


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
