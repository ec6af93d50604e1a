"""Application of `precision` to a model: which layers round to fp8, and with which implementation."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

from mrl import platform
from mrl.config.sections.precision import FP8Config
from mrl.families import UnsupportedModel
from mrl.kernels.fp8 import Recipe, Scales
from mrl.kernels.head_fused import FusedFP8Products
from mrl.kernels.head_products import Products, RoundedProducts, plain_products
from mrl.models.layer_kind import LayerKind

STATE = b"mrl-fp8:"  # prefix of an emulated layer's checkpoint state; float32 values follow
_TRANSFORMER_ENGINE_NAMES = {"current": "tensorwise"}  # Megatron's; the others are the same


@dataclass(frozen=True)
class FP8Emulation:
    """Rounding of mrl's own layers.

    ends: unrounded layers at each end of the model
    """

    recipe: Recipe
    ends: int
    history: int
    history_use: Literal["max", "most_recent"]
    margin: int

    def rounds(self, layer: int, layers: int) -> bool:
        """Returns True if layer number `layer` of `layers` rounds."""
        return self.ends <= layer < layers - self.ends

    def scales(self) -> Scales | None:
        """Returns the fresh amax history of one linear layer; None without delayed scaling."""
        if self.recipe.scaling != "delayed":
            return None
        return Scales(self.recipe, self.history, self.history_use, self.margin)


def recipe_of(cfg: FP8Config) -> Recipe | None:
    """Returns the fp8 recipe; None without fp8."""
    if cfg.recipe == "none":
        return None
    return Recipe(cfg.recipe, hybrid=cfg.chosen_format == "hybrid", wgrad=cfg.wgrad)


def head_products(cfg: FP8Config) -> Products:
    """Returns the products of the loss head.

    The head has no amax history: with delayed scaling it scales as current does.
    """
    recipe = recipe_of(cfg)
    if recipe is None or not cfg.head:
        return plain_products
    return partial(RoundedProducts if cfg.emulate else FusedFP8Products, recipe=recipe)


def emulation_of(cfg: FP8Config) -> FP8Emulation | None:
    """Returns the rounding of mrl's own layers; None if they do not round."""
    recipe = recipe_of(cfg)
    if recipe is None or not cfg.emulate:
        return None
    return FP8Emulation(recipe, cfg.first_last_bf16, cfg.history, cfg.history_use, cfg.margin)


def transformer_engine_fields(cfg: FP8Config, kind: LayerKind) -> dict[str, Any]:
    """Returns TransformerConfig's fp8 fields for these layers; none without fp8 and for emulated layers.

    Raises UnsupportedModel, with the reason, if this machine cannot compute the recipe.
    """
    if cfg.recipe == "none" or cfg.emulate:
        return {}
    if (problem := platform.fp8_problem(cfg.recipe)) is not None:
        raise UnsupportedModel(f"precision.fp8.recipe: {cfg.recipe} cannot be computed here: {problem}")
    if kind != "transformer_engine":
        raise UnsupportedModel(
            f"precision.fp8.recipe: {cfg.recipe} needs layers: transformer_engine, and these are {kind} layers"
        )
    ends = {"num_layers_at_start_in_bf16": cfg.first_last_bf16, "num_layers_at_end_in_bf16": cfg.first_last_bf16}
    return {
        "fp8": cfg.chosen_format,
        "fp8_recipe": _TRANSFORMER_ENGINE_NAMES.get(cfg.recipe, cfg.recipe),
        "fp8_param": cfg.params,
        "fp8_wgrad": cfg.wgrad,
        "fp8_margin": cfg.margin,
        "fp8_amax_history_len": cfg.history,
        "fp8_amax_compute_algo": cfg.history_use,
        "first_last_layers_bf16": cfg.first_last_bf16 > 0,
        **(ends if cfg.first_last_bf16 else {}),
    }
