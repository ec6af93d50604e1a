"""fp8: transformer-engine's recipes on this GPU, against their emulation, against bfloat16, and for their speed. What
needs no transformer-engine is rehearsed on a CPU."""

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
from tools.gpu.stage_cuda import of_sft, same_losses
from tools.gpu.stage_engine import NOTHING_GIVEN_UP, engine, has_sglang, of_grpo
from tools.gpu.stage_speed import MODELS, learner_of, step
from tools.gpu.timing import random, rounds_of, seconds
from tools.gpu.trained import Row, sampled, task, train

RECIPES = ("current", "delayed", "blockwise", "mxfp8")
RUN_S = 60.0
NEAR = 0.05  # losses and gradient norms of the same steps, fp8 against bfloat16, relative
SAME_NUMBERS = 1e-6  # share of values that are cast otherwise than emulated
SAME_LOG_PROBS = 1e-3  # nats, in the mean: the same rounded operands, summed in another order
LINEAR_SPEED = 1 / 1.6  # of bfloat16's seconds, casts included
STEP_SPEED = 1 / 1.3


def here(recipe: str, check: Check) -> Check:
    """The check, skipped with the reason where this GPU cannot compute the recipe."""

    def made(setting: Setting) -> Numbers:
        if not setting.rehearsal and (problem := platform.fp8_problem(recipe)) is not None:
            raise Skipped(problem)
        return check(setting)

    return made


def casts(recipe: str) -> Check:
    """transformer-engine's values, cast and back, against the emulation's."""

    def check(setting: Setting) -> Numbers:
        found, x = _recipe(recipe), random(256, 512).float() * torch.exp(random(256, 1).float())
        x = x.bfloat16()
        numbers: Numbers = {}
        for role in ROLES:
            own = found.rounded(x, role, 1)
            theirs = own if setting.rehearsal else _cast(x, role, found).dequantize(dtype=torch.float32)
            numbers[role] = float((own != theirs).float().mean())
        return require(numbers, **dict.fromkeys(ROLES, SAME_NUMBERS))

    return check


def head(recipe: str) -> Check:
    """The loss head by transformer-engine's products against emulated ones: log-probs and both gradients."""

    def check(setting: Setting) -> Numbers:
        found = _recipe(recipe)
        emulated: Products = partial(RoundedProducts, recipe=found)
        fused: Products = emulated if setting.rehearsal else partial(FusedFP8Products, recipe=found)
        want, got = _head(emulated), _head(fused)
        numbers: Numbers = {"log-probs": float((got[0] - want[0]).abs().mean())}
        for name, mine, theirs in zip(("hidden", "weight"), got[1:], want[1:]):
            numbers[name] = float((mine.float() - theirs.float()).norm() / theirs.float().norm())
        return require(numbers, **{"log-probs": SAME_LOG_PROBS, "hidden": 0.02, "weight": 0.02})

    return check


def linear(recipe: Any) -> Check:
    """Forward and backward of transformer-engine's linear layer, casts included, against bfloat16."""

    def check(setting: Setting) -> Numbers:
        if setting.rehearsal:
            raise Skipped("a rehearsal has one kind of layer")
        import transformer_engine.pytorch as te
        from transformer_engine.common.recipe import Float8BlockScaling, Float8CurrentScaling

        layer, x = te.Linear(8192, 8192, bias=False, params_dtype=torch.bfloat16), random(8192, 8192)
        x.requires_grad_()
        own = {"current": Float8CurrentScaling, "blockwise": Float8BlockScaling}[recipe]()

        def both(enabled: bool) -> None:
            with te.fp8_autocast(enabled=enabled, fp8_recipe=own):
                y = layer(x)
            y.backward(y)

        rounds = rounds_of(setting)
        plain, fp8 = seconds(lambda: both(False), rounds), seconds(lambda: both(True), rounds)
        return require({"bf16 ms": plain * 1e3, "fp8 ms": fp8 * 1e3, "ratio": fp8 / plain}, ratio=LINEAR_SPEED)

    return check


def step_of(recipe: Any) -> Check:
    """An update of two layers of a 32B model and a head of 32,768 words, everything in fp8 that can be, against
    bfloat16."""

    def check(setting: Setting) -> Numbers:
        rounds = rounds_of(setting)
        precisions = PrecisionConfig(fp8=FP8Config(recipe=recipe, head=True)), PrecisionConfig()
        fp8, plain = (_stepped(setting, precision, rounds) for precision in precisions)
        numbers = {"tokens": plain["tokens"], "bf16 s": plain["s"], "fp8 s": fp8["s"], "ratio": fp8["s"] / plain["s"]}
        return numbers if setting.rehearsal else require(numbers, ratio=STEP_SPEED)

    return check


def _stepped(setting: Setting, precision: PrecisionConfig, rounds: int) -> Numbers:
    """A step of a learner that leaves no memory behind."""
    numbers = step(_wide(setting, precision), *_batch(setting), rounds)
    gc.collect()
    platform.release_cached_memory()
    return numbers


def trained(recipe: str, emulate: bool) -> Check:
    """Six steps of SFT of the 20M model, against the same in bfloat16."""

    def check(setting: Setting) -> Numbers:
        kind = "emulated" if emulate else "by transformer-engine"
        own = f"actor.precision.fp8={{recipe: {recipe}, emulate: {str(emulate).lower()}, head: true}}"
        plain = _in_bfloat16(setting)
        return same_losses(plain, _six_steps(setting, f"{recipe} {kind}", own), NEAR)

    return check


@cache
def _in_bfloat16(setting: Setting) -> list[Row]:
    return _six_steps(setting, "bfloat16")


def _six_steps(setting: Setting, name: str, *words: str) -> list[Row]:
    given = [*of_sft(task(setting, "sort-20m")), "run.steps=6", "checkpoint.export_hf=false", *words]
    return train(setting, name, "quickstart_gpu_sft", given, RUN_S)


def held(setting: Setting) -> Numbers:
    """Two steps of GRPO with weights in fp8: main weights from what was loaded, every push proved by its checksum."""
    own = ["actor.layers=auto", "actor.precision.fp8={recipe: current, params: true}", "run.steps=2"]
    words = [*of_grpo(setting), *engine(has_sglang()), *NOTHING_GIVEN_UP, *own]
    return sampled(train(setting, "weights in fp8", "quickstart_gpu", words, RUN_S))


def _recipe(name: Any) -> Recipe:
    found = recipe_of(FP8Config(recipe=name))
    assert found is not None
    return found


def _batch(setting: Setting) -> tuple[int, int]:
    """Sequences, and tokens of each."""
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
    **{f"casts are the emulation's: {name}": here(name, casts(name)) for name in RECIPES},
    **{f"the loss head is the emulation's: {name}": here(name, head(name)) for name in RECIPES},
    "te.Linear, current, against bfloat16": here("current", linear("current")),
    "te.Linear, blockwise, against bfloat16": here("blockwise", linear("blockwise")),
    "an update, current, against bfloat16": here("current", step_of("current")),
    "an update, blockwise, against bfloat16": here("blockwise", step_of("blockwise")),
    "SFT in current is near bfloat16": here("current", trained("current", emulate=False)),
    "SFT in blockwise is near bfloat16": here("blockwise", trained("blockwise", emulate=False)),
    "SFT, current emulated, is near bfloat16": trained("current", emulate=True),
    "GRPO, weights in fp8, every push by checksum": here("current", held),
}
