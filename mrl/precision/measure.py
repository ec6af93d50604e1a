"""Log-probs and policy gradient of a model in each emulated recipe, against the same weights in float32."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mrl import platform
from mrl.config.schema import Config, FP8Config, OptimizerConfig, ParallelConfig, PrecisionConfig
from mrl.families import ModelArch, load_arch
from mrl.learner import Learner, losses
from mrl.parallel import Meshes
from mrl.precision.samples import ComparisonSamples

RECIPES = ("current", "delayed", "blockwise", "mxfp8")
CLIP = 0.2  # PPO clips ratios further from 1 than this


@dataclass(frozen=True)
class RecipeErrors:
    """Errors of one numeric form against float32, over all response tokens.

    log_prob, log_prob_worst: mean and largest |error| of a log-prob, nats
    ratio, clipped: mean |exp(error) - 1|, the PPO ratio's error before any update; share beyond CLIP
    cosine, length: cosine of the policy gradient with float32's, and its relative length
    """

    name: str
    log_prob: float
    log_prob_worst: float
    ratio: float
    clipped: float
    cosine: float
    length: float


@dataclass(frozen=True)
class _Numbers:
    """log_probs [R]; gradient: the whole gradient, [parameters]."""

    log_probs: Tensor
    gradient: Tensor


def measure(
    cfg: Config, weights: str, samples: ComparisonSamples, recipes: Sequence[str], note: Callable[[str], None]
) -> list[RecipeErrors]:
    """Returns one row per form: model.dtype alone, then each recipe in the layers, in the lm_head, and in both. One
    process.

    weights: a Hugging Face directory; note: called with the name of the form computed next
    """
    arch, dtype = load_arch(weights), getattr(torch, cfg.model.dtype)
    forms = dict(_forms(cfg, arch, recipes))
    if dtype != torch.float32:
        forms = {cfg.model.dtype: FP8Config(), **forms}
    with platform.single_process_world(cfg.run.timeout_s):
        meshes = Meshes(cfg.run.timeout_s, cfg.run.seed)

        def numbers(name: str, fp8: FP8Config, dtype: torch.dtype) -> _Numbers:
            note(name)
            return _numbers(_learner(cfg, weights, arch, meshes, fp8, dtype), samples, warm=fp8.recipe == "delayed")

        exact = numbers("float32", FP8Config(), torch.float32)
        return [_row(name, numbers(name, fp8, dtype), exact) for name, fp8 in forms.items()]


def _forms(cfg: Config, arch: ModelArch, recipes: Sequence[str]) -> Iterator[tuple[str, FP8Config]]:
    own = cfg.actor.precision.fp8
    for recipe in recipes:
        keys = {"recipe": recipe, "format": own.format if own.recipe == recipe else None, "emulate": True}
        ends = own.first_last_bf16
        yield recipe, FP8Config.model_validate(keys | {"first_last_bf16": ends})
        yield (
            f"{recipe}, head alone",
            FP8Config.model_validate(keys | {"first_last_bf16": arch.num_layers, "head": True}),
        )
        yield f"{recipe} and head", FP8Config.model_validate(keys | {"first_last_bf16": ends, "head": True})


def _learner(cfg: Config, weights: str, arch: ModelArch, meshes: Meshes, fp8: FP8Config, dtype: torch.dtype) -> Learner:
    """Returns a learner whose updates change nothing (learning rate 0)."""
    train = cfg.actor.model_copy(
        update={
            "parallel": ParallelConfig(),
            "optimizer": OptimizerConfig(lr=0.0),
            "precision": PrecisionConfig(fp8=fp8),
            "layers": "local",
            "offload": "none",
        }
    )
    return Learner(
        "policy",
        arch,
        weights,
        train,
        meshes.get(train.parallel),
        dtype=dtype,
        seed=cfg.run.seed,
        from_scratch=cfg.model.from_scratch and weights == cfg.model.path,
        allow_pickle=cfg.model.allow_pickle,
    )


def _numbers(learner: Learner, samples: ComparisonSamples, *, warm: bool) -> _Numbers:
    """warm: runs two updates first, which change only the recipe's amax history, one for each direction."""
    rollout = samples.rollout
    loss = losses.cross_entropy(samples.weights)
    for _ in range(2 if warm else 0):
        learner.backward(rollout, range(rollout.num_samples), loss, samples.temperature)
        learner.step()
    log_probs, _ = learner.log_probs(rollout, samples.temperature)
    learner.backward(rollout, range(rollout.num_samples), loss, samples.temperature)
    parts = [parameter.main_grad.flatten() for chunk in learner.bare for parameter in chunk.parameters()]
    return _Numbers(log_probs, torch.cat(parts).cpu())


def _row(name: str, got: _Numbers, exact: _Numbers) -> RecipeErrors:
    error = (got.log_probs - exact.log_probs).double()
    off = error.expm1().abs()
    g, want = got.gradient.double(), exact.gradient.double()
    return RecipeErrors(
        name,
        float(error.abs().mean()),
        float(error.abs().max()),
        float(off.mean()),
        float((off > CLIP).double().mean()),
        float(g @ want / (g.norm() * want.norm())),
        float(g.norm() / want.norm()),
    )
