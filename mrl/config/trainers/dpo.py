"""Configuration and checks of `trainer: dpo`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from mrl.config.checks.base import Archs, check_refresh, without_effect
from mrl.config.derived import Machine
from mrl.config.problems import Problem
from mrl.config.sections.preference import PreferenceConfig, PreferenceRefConfig
from mrl.config.trainers.base import DataUse, ModelSpec, ModelUse
from mrl.config.trainers.preferences import PreferencesConfig, check_common

LOSS, REF = "preference.loss", "ref.policy"


class DPOConfig(PreferencesConfig):
    """`trainer: dpo`: preference learning from pairs or labeled responses."""

    trainer: Literal["dpo"]  # preference learning: DPO, IPO, SimPO, ORPO, KTO and related losses
    preference: PreferenceConfig = PreferenceConfig()
    ref: PreferenceRefConfig = PreferenceRefConfig()

    @property
    def has_own_reference(self) -> bool:
        """True if the reference is a second model, also if it exists before the first step only."""
        return self.preference.needs_reference and self.ref.policy != "refreshed" and not self.ref_is_actor

    @property
    def ref_is_actor(self) -> bool:
        """True if the reference is the actor without its adapters."""
        is_base = self.actor.lora is not None and self.ref.policy == "frozen" and self.ref.path is None
        return self.preference.needs_reference and is_base

    def models(self) -> dict[str, ModelUse]:
        path = self.ref.path if self.has_own_reference else None
        return super().models() | {"ref": ModelUse(path, self.actor.parallel if self.has_own_reference else None)}

    def built(self) -> dict[str, ModelSpec]:
        stays = self.has_own_reference and self.ref.policy != "cached"
        return super().built() | ({"ref": ModelSpec(self.ref.path, self.actor)} if stays else {})

    def frozen(self) -> dict[str, str | None]:
        return {"ref": self.ref.path} if self.has_own_reference else {}

    def copies(self) -> dict[str, bool]:
        moves = self.preference.needs_reference and self.ref.policy == "refreshed"
        return {"reference": True} if moves else {}

    @property
    def responses_per_row(self) -> int:
        return 1 if self.preference.is_unpaired else 2

    def passes(self) -> tuple[str, ...]:
        is_live = self.preference.needs_reference and self.ref.policy != "cached"
        live = (("actor",) if self.ref_is_actor else ("ref",)) if is_live else ()
        return (("actor",) if self.preference.couples_rows else ()) + live

    def validated_metrics(self) -> tuple[str, ...]:
        has_rewards = any("beta" in type(loss).model_fields for loss in self.preference.loss.chosen.values())
        compares = has_rewards and self.responses_per_row == 2
        return ("loss", "rewards/accuracies", "rewards/margins") if compares else ("loss",)

    def data_uses(self) -> dict[str, DataUse]:
        form: Literal["pairs", "labels"] = "labels" if self.preference.is_unpaired else "pairs"
        return {"data": DataUse(self.data, self.batch.rows_per_step, preferences=form, is_evaluated=True)}

    def summary(self) -> list[tuple[str, str]]:
        what = "responses with a label" if self.preference.is_unpaired else "pairs"
        losses = " + ".join(
            name if loss.weight == 1 else f"{loss.weight:g} {name}"
            for name, loss in self.preference.loss.chosen.items()
        )
        reference = self.ref.policy if self.preference.needs_reference else "none"
        rows = [("step", f"{self.batch.rows_per_step} {what}, 1 update"), ("loss", losses)]
        return [*rows, ("reference", reference)]


def check(cfg: DPOConfig, archs: Archs, machine: Machine) -> Iterator[Problem]:
    yield from check_common(cfg, archs, machine)
    yield from _losses(cfg)
    yield from _reference(cfg)
    yield from _pictures(cfg, archs)
    yield from without_effect(cfg.data, "data", ["answer_key"], "dpo uses chosen_key and rejected_key", "trainer")
    kind, others = "pairs", ["completion_key", "label_key"]
    if cfg.preference.is_unpaired:
        kind, others = "responses with a label", ["completions_key", "ranked_pairs"]
    yield from without_effect(cfg.data, "data", others, f"the losses use {kind}", LOSS)
    yield from without_effect(cfg.data, "data", ["margin_key"], "no loss uses a margin", LOSS)


def _losses(cfg: DPOConfig) -> Iterator[Problem]:
    preference, chosen = cfg.preference, cfg.preference.loss.chosen
    if not chosen:
        yield Problem((LOSS,), "names no loss: set at least one")
    for name, loss in chosen.items():
        yield from (Problem((f"{LOSS}.{name}.{key}",), message) for key, message in loss.problems())
    paired = [name for name, loss in chosen.items() if not loss.is_unpaired]
    unpaired = [name for name, loss in chosen.items() if loss.is_unpaired]
    if paired and unpaired:
        message = f"{', '.join(unpaired)} need labeled responses, and {', '.join(paired)} pairs: choose one kind"
        yield Problem((LOSS,), message)
    if unpaired and cfg.batch.rows_per_step < 2 and preference.needs_kl:
        message = "kto pairs each prompt with another row's response: use at least 2 rows per step"
        yield Problem(("batch.rows_per_step", LOSS), message)
    whole = [name for name, loss in chosen.items() if loss.sums_whole]
    if preference.ld_alpha is not None and ({*whole} - {"sft"} or len(whole) == len(chosen)):
        message = f"applies to log-ratios of pairs, but {', '.join(whole)} weight all tokens equally: leave it out"
        yield Problem(("preference.ld_alpha", LOSS), message)
    sorting = [name for name in chosen if name in ("aot", "aot_unpaired", *unpaired)]
    if preference.use_weighting and sorting:
        message = f"weights pairs, but {', '.join(sorting)} {'have' if unpaired else 'compares the batch and has'} none"
        yield Problem(("preference.use_weighting", LOSS), message)
    if preference.reference_free and not any(loss.uses_reference for loss in chosen.values()):
        message = f"has no effect: {', '.join(chosen)} use no reference"
        yield Problem(("preference.reference_free", LOSS), message)


def _pictures(cfg: DPOConfig, archs: Archs) -> Iterator[Problem]:
    """Checks a vision model."""
    actor = archs["actor"]
    if actor is None or actor.vision is None:
        return
    if cfg.preference.learns_prompts:
        message = "trains on whole prompts, and with them on image tokens: not supported for vision models"
        yield Problem((LOSS, "model.path"), message)
    if cfg.preference.needs_reference and cfg.ref.policy == "cached":
        message = "cached does not detect changed images of vision models: use frozen or refreshed"
        yield Problem((REF, "model.path"), message)


def _reference(cfg: DPOConfig) -> Iterator[Problem]:
    ref = cfg.ref
    if not cfg.preference.needs_reference:
        yield from without_effect(ref, "ref", list(type(ref).model_fields), "no reference is used", LOSS)
        return
    yield from check_refresh(ref, cfg.run.steps)
    if ref.policy == "refreshed":
        because = "the reference is refreshed: it runs in the actor, with other weights"
        yield from without_effect(ref, "ref", ["path"], because, REF)
    if ref.policy == "cached" and cfg.preference.needs_kl:
        message = "kto needs the reference in every step, for responses to other prompts: use frozen or refreshed"
        yield Problem((REF, LOSS), message)
