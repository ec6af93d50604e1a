"""transformer-engine's layers in bfloat16: parity of every family, and checkpoints between both kinds of layer."""

from __future__ import annotations

from tools.gpu.parity import CPU, FUSABLE, FUSED, LOCAL, judged, parity, processes, results
from tools.gpu.stage import Check, Numbers, Setting, Skipped
from tools.gpu.stage_cuda import of_sft, same_losses
from tools.gpu.trained import Row, task, train

RUN_S = 60.0
NEAR = 0.02  # losses and gradient norms of the same steps in bfloat16, relative


def here(check: Check) -> Check:
    """The check, skipped with the reason where transformer-engine cannot be used."""

    def made(setting: Setting) -> Numbers:
        from mrl import platform

        problem = platform.transformer_engine_problem()
        if problem is not None and not setting.rehearsal:
            raise Skipped(f"transformer-engine: {problem}")
        return check(setting)

    return made


def against_local(setting: Setting) -> Numbers:
    """The same in bfloat16 by both kinds of layer."""
    if setting.rehearsal:
        raise Skipped("a rehearsal has one kind of layer")
    local, fused = results(setting, "qwen3", [LOCAL, FUSED])
    return judged(fused, local, rounded=True)


def across(first: str, second: str) -> Check:
    """Three steps by one kind of layer, three more by the other, against six by the first."""

    def check(setting: Setting) -> Numbers:
        words = [*of_sft(task(setting, "sort-20m")), "checkpoint.every_steps=3", "checkpoint.export_hf=false"]

        def steps(name: str, layers: str, count: int) -> list[Row]:
            own = [*words, f"actor.layers={layers}", f"run.steps={count}", "actor.optimizer.warmup_steps=1"]
            return train(setting, name, "quickstart_gpu_sft", own, RUN_S)

        whole = steps(f"{first} alone", first, 6)
        steps(f"{first}, {second}", first, 3)
        return same_losses(whole[3:], steps(f"{first}, {second}", second, 6)[-3:], NEAR)

    return check


CHECKS: dict[str, Check] = {
    name: here(check)
    for name, check in {
        "processes of the next checks": processes(FUSABLE, [CPU, LOCAL, FUSED]),
        **{f"bfloat16 is near: {family}": parity(family, FUSED) for family in FUSABLE},
        "against local layers": against_local,
        "a checkpoint of local layers goes on": across("local", "transformer_engine"),
        "a checkpoint of transformer-engine's goes on in local layers": across("transformer_engine", "local"),
    }.items()
}
