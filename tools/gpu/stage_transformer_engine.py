"""transformer-engine's layers in bfloat16: parity of every family; checkpoints that move between kinds of layers."""

from __future__ import annotations

from tools.gpu.parity import CPU, FUSABLE, FUSED, LOCAL, compared, parity, processes, results
from tools.gpu.stage import Check, Numbers, Setting, Skipped
from tools.gpu.stage_cuda import same_losses, sft_overrides
from tools.gpu.trained import Row, task, train

RUN_S = 60.0
RESUME_ERROR = 0.02  # relative, of losses and gradient norms of the same steps in bfloat16


def if_supported(check: Check) -> Check:
    """Returns the check; it is skipped with the reason if transformer-engine cannot be used."""

    def guarded(setting: Setting) -> Numbers:
        from mrl import platform

        problem = platform.transformer_engine_problem()
        if problem is not None and not setting.rehearsal:
            raise Skipped(f"transformer-engine: {problem}")
        return check(setting)

    return guarded


def against_local(setting: Setting) -> Numbers:
    """Compares both kinds of layers in bfloat16."""
    if setting.rehearsal:
        raise Skipped("a rehearsal has one kind of layer")
    local, fused = results(setting, "qwen3", [LOCAL, FUSED])
    return compared(fused, local, rounded=True)


def across(first: str, second: str) -> Check:
    """Returns a check that compares three steps by each kind of layers, one after the other, with six by the first."""

    def check(setting: Setting) -> Numbers:
        common = [*sft_overrides(task(setting, "sort-20m")), "checkpoint.every_steps=3", "checkpoint.export_hf=false"]

        def steps(name: str, layers: str, count: int) -> list[Row]:
            overrides = [*common, f"actor.layers={layers}", f"run.steps={count}", "actor.optimizer.warmup_steps=1"]
            return train(setting, name, "quickstart_gpu_sft", overrides, RUN_S)

        whole = steps(f"{first} alone", first, 6)
        steps(f"{first}, {second}", first, 3)
        return same_losses(whole[3:], steps(f"{first}, {second}", second, 6)[-3:], RESUME_ERROR)

    return check


CHECKS: dict[str, Check] = {
    name: if_supported(check)
    for name, check in {
        "processes of the next checks": processes(FUSABLE, [CPU, LOCAL, FUSED]),
        **{f"bfloat16 is near: {family}": parity(family, FUSED) for family in FUSABLE},
        "against local layers": against_local,
        "a checkpoint of local layers goes on": across("local", "transformer_engine"),
        "a checkpoint of transformer-engine's goes on in local layers": across("transformer_engine", "local"),
    }.items()
}
