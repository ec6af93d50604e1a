"""fp8: transformer-engine's recipes on this GPU against their emulation and against bfloat16, and their speed.

A rehearsal on a CPU runs the checks that do not need transformer-engine.
"""

from __future__ import annotations

import gc
import json
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor

from mrl import platform
from mrl.config.schema import FP8Config, PrecisionConfig, TrainConfig
from mrl.kernels.fp8 import ROLES, Recipe
from mrl.kernels.head_fused import FusedFP8Products, _cast
from mrl.kernels.head_products import Products, RoundedProducts
from mrl.kernels.linear_logprob import linear_log_prob
from mrl.learner import Learner
from mrl.models.precision import recipe_of
from tools.gpu.stage import Check, Numbers, Setting, Skipped, require
from tools.gpu.stage_cuda import same_losses, sft_overrides
from tools.gpu.stage_engine import NOTHING_RELEASED, engine_overrides, grpo_overrides, has_sglang
from tools.gpu.stage_speed import MODELS, learner_of, update_numbers
from tools.gpu.timing import random, rounds_of, seconds
from tools.gpu.trained import Row, rollout_numbers, task, train

RECIPES = ("current", "delayed", "blockwise", "mxfp8")
RUN_S = 60.0
SFT_ERROR = 0.05  # relative, of losses and gradient norms of the same steps, fp8 against bfloat16
CAST_ERROR = 1e-6  # share of values that transformer-engine and the emulation cast differently
HEAD_NATS = 1e-3  # mean difference of log-probs: the same rounded operands, summed in another order
LINEAR_SPEED = 1 / 1.6  # seconds relative to bfloat16, casts included
STEP_SPEED = 1 / 1.3


def if_supported(recipe: str, check: Check) -> Check:
    """Returns the check; it is skipped with the reason if this GPU cannot compute the recipe."""

    def guarded(setting: Setting) -> Numbers:
        if not setting.rehearsal and (problem := platform.fp8_problem(recipe)) is not None:
            raise Skipped(problem)
        return check(setting)

    return guarded


def casts(recipe: str) -> Check:
    """Returns a check: transformer-engine casts values to fp8 and back as the emulation does."""

    def check(setting: Setting) -> Numbers:
        fp8 = _recipe(recipe)
        x = (random(256, 512).float() * torch.exp(random(256, 1).float())).bfloat16()
        numbers: Numbers = {}
        for role in ROLES:
            emulated = fp8.rounded(x, role, 1)
            cast = emulated if setting.rehearsal else _cast(x, role, fp8).dequantize(dtype=torch.float32)
            numbers[role] = float((emulated != cast).float().mean())
        return require(numbers, **dict.fromkeys(ROLES, CAST_ERROR))

    return check


def head(recipe: str) -> Check:
    """Returns a check: the loss head's log-probs and gradients, by transformer-engine's GEMMs, equal emulated ones."""

    def check(setting: Setting) -> Numbers:
        fp8 = _recipe(recipe)
        emulated: Products = partial(RoundedProducts, recipe=fp8)
        fused: Products = emulated if setting.rehearsal else partial(FusedFP8Products, recipe=fp8)
        want, got = _head(emulated), _head(fused)
        numbers: Numbers = {"log-probs": float((got[0] - want[0]).abs().mean())}
        for name, a, b in zip(("hidden", "weight"), got[1:], want[1:]):
            numbers[name] = float((a.float() - b.float()).norm() / b.float().norm())
        return require(numbers, **{"log-probs": HEAD_NATS, "hidden": 0.02, "weight": 0.02})

    return check


def linear(recipe: Any) -> Check:
    """Returns a check that times forward and backward of transformer-engine's linear layer, casts included."""

    def check(setting: Setting) -> Numbers:
        if setting.rehearsal:
            raise Skipped("a rehearsal has one kind of layer")
        import transformer_engine.pytorch as te
        from transformer_engine.common.recipe import Float8BlockScaling, Float8CurrentScaling

        layer, x = te.Linear(8192, 8192, bias=False, params_dtype=torch.bfloat16), random(8192, 8192)
        x.requires_grad_()
        fp8_recipe = {"current": Float8CurrentScaling, "blockwise": Float8BlockScaling}[recipe]()

        def both(enabled: bool) -> None:
            with te.fp8_autocast(enabled=enabled, fp8_recipe=fp8_recipe):
                y = layer(x)
            y.backward(y)

        rounds = rounds_of(setting)
        plain, fp8 = seconds(lambda: both(False), rounds), seconds(lambda: both(True), rounds)
        return require({"bf16 ms": plain * 1e3, "fp8 ms": fp8 * 1e3, "ratio": fp8 / plain}, ratio=LINEAR_SPEED)

    return check


def update(recipe: Any) -> Check:
    """Returns a check that times an update of two layers of a 32B model with a vocabulary of 32,768 tokens.

    Everything that can be in fp8 is; the time is compared with bfloat16's.
    """

    def check(setting: Setting) -> Numbers:
        rounds = rounds_of(setting)
        precisions = PrecisionConfig(fp8=FP8Config(recipe=recipe, head=True)), PrecisionConfig()
        fp8, plain = (_update_numbers(setting, precision, rounds) for precision in precisions)
        numbers = {"tokens": plain["tokens"], "bf16 s": plain["s"], "fp8 s": fp8["s"], "ratio": fp8["s"] / plain["s"]}
        return numbers if setting.rehearsal else require(numbers, ratio=STEP_SPEED)

    return check


def _update_numbers(setting: Setting, precision: PrecisionConfig, rounds: int) -> Numbers:
    """Times an update, then frees the learner's memory."""
    numbers = update_numbers(_wide(setting, precision), *_batch(setting), rounds)
    gc.collect()
    platform.release_cached_memory()
    return numbers


def sft(recipe: str, emulate: bool) -> Check:
    """Returns a check that compares six SFT steps of the 20M model in fp8 with the same in bfloat16."""

    def check(setting: Setting) -> Numbers:
        kind = "emulated" if emulate else "by transformer-engine"
        fp8 = f"actor.precision.fp8={{recipe: {recipe}, emulate: {str(emulate).lower()}, head: true}}"
        return same_losses(_in_bfloat16(setting), _six_steps(setting, f"{recipe} {kind}", fp8), SFT_ERROR)

    return check


@cache
def _in_bfloat16(setting: Setting) -> list[Row]:
    return _six_steps(setting, "bfloat16")


def _six_steps(setting: Setting, name: str, *overrides: str) -> list[Row]:
    common = [*sft_overrides(task(setting, "sort-20m")), "run.steps=6", "checkpoint.export_hf=false"]
    return train(setting, name, "quickstart_gpu_sft", [*common, *overrides], RUN_S)


def fp8_weights(setting: Setting) -> Numbers:
    """Runs two GRPO steps with weights in fp8, each weight sync verified by checksum."""
    overrides = [*grpo_overrides(setting), *engine_overrides(has_sglang()), *NOTHING_RELEASED, "actor.layers=auto"]
    overrides += ["actor.precision.fp8={recipe: current, params: true}", "run.steps=2"]
    return rollout_numbers(train(setting, "weights in fp8", "quickstart_gpu", overrides, RUN_S))


def _recipe(name: Any) -> Recipe:
    recipe = recipe_of(FP8Config(recipe=name))
    assert recipe is not None
    return recipe


def _batch(setting: Setting) -> tuple[int, int]:
    """Returns the number of sequences and the tokens of each."""
    return (2, 64) if setting.rehearsal else (8, 1024)


def _wide(setting: Setting, precision: PrecisionConfig) -> Learner:
    if setting.rehearsal:
        precision = PrecisionConfig(fp8=precision.fp8.model_copy(update={"emulate": True}))
        return learner_of(MODELS / "sort-20m", TrainConfig(precision=precision))
    model = setting.work / "two layers of Qwen3-32B"
    model.mkdir(exist_ok=True)
    sizes = json.loads((MODELS / "Qwen3-32B" / "config.json").read_text())
    (model / "config.json").write_text(
        json.dumps(sizes | {"num_hidden_layers": 2, "vocab_size": 32768, "eos_token_id": 0})
    )
    train = TrainConfig(layers="transformer_engine", precision=precision, max_tokens_per_microbatch=8192)
    return learner_of(model, train)


def _head(products: Products) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(0)
    numbers = [torch.randn(*size, generator=generator).bfloat16() for size in ((300, 256), (384, 256))]
    hidden, weight = (x.to(platform.device()).requires_grad_() for x in numbers)
    labels = torch.arange(300, device=platform.device())
    log_probs, *_ = linear_log_prob(hidden, weight, labels, 8.0, 0, 384, products=products)
    log_probs.sum().backward()
    assert hidden.grad is not None and weight.grad is not None
    return log_probs.detach(), hidden.grad, weight.grad


CHECKS: dict[str, Check] = {
    **{f"casts are the emulation's: {name}": if_supported(name, casts(name)) for name in RECIPES},
    **{f"the loss head is the emulation's: {name}": if_supported(name, head(name)) for name in RECIPES},
    "te.Linear, current, against bfloat16": if_supported("current", linear("current")),
    "te.Linear, blockwise, against bfloat16": if_supported("blockwise", linear("blockwise")),
    "an update, current, against bfloat16": if_supported("current", update("current")),
    "an update, blockwise, against bfloat16": if_supported("blockwise", update("blockwise")),
    "SFT in current is near bfloat16": if_supported("current", sft("current", emulate=False)),
    "SFT in blockwise is near bfloat16": if_supported("blockwise", sft("blockwise", emulate=False)),
    "SFT, current emulated, is near bfloat16": sft("current", emulate=True),
    "GRPO, weights in fp8, every push by checksum": if_supported("current", fp8_weights),
}
