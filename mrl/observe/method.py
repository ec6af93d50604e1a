"""Name of a configuration's training method, in the field's terms."""

from __future__ import annotations

from typing import Any

_ESTIMATORS = {"gae": "PPO"}
_TRAINERS = {
    "sft": "supervised fine-tuning",
    "dpo": "preference learning",
    "reward_model": "reward modeling",
    "diffusion_sft": "diffusion fine-tuning",
}


def method_of(config: dict[str, Any]) -> str:
    """Returns the method of a parsed config.yaml, for example "PPO", "GRPO", "supervised fine-tuning" or "preference
    learning (sigmoid)"; empty if the configuration does not say."""
    trainer = str(config.get("trainer", ""))
    if trainer == "rl":
        estimator = str(_section(config, "algorithm").get("adv_estimator", ""))
        return _ESTIMATORS.get(estimator, estimator.replace("_", " ").upper())
    chosen = _section(_section(config, "preference"), "loss")
    losses = " + ".join(name for name, loss in chosen.items() if loss is not None)
    return _TRAINERS.get(trainer, trainer.upper()) + (f" ({losses})" if losses else "")


def _section(config: dict[str, Any], name: str) -> dict[str, Any]:
    found = config.get(name)
    return found if isinstance(found, dict) else {}
