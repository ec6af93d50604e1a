"""Directory of adapters in PEFT's format: adapter_config.json, adapter_model.safetensors, and mrl's own notes.

SGLang reads `lora_alpha / r` and nothing else of the scaling of B A: mrl therefore writes the whole scale into that
ratio, which PEFT computes identically.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mrl.families import ModelArch
from mrl.families.adapters import LoRA
from mrl.families.peft import STEPS, peft_config
from mrl.families.table import Role
from mrl.foreign import read_json
from mrl.weights.errors import WeightError

CONFIG, WEIGHTS, NOTES = "adapter_config.json", "adapter_model.safetensors", "mrl_adapter.json"
_MUST_BE: dict[str, tuple[Any, ...]] = {  # other values change the computation in a way that mrl does not implement
    "peft_type": ("LORA",),
    "bias": (None, "none"),
    "fan_in_fan_out": (None, False),
    "lora_bias": (None, False),
    "rank_pattern": (None, {}),
    "alpha_pattern": (None, {}),
    "layer_replication": (None,),
    "target_parameters": (None, []),
    "trainable_token_indices": (None,),
    "alora_invocation_tokens": (None,),
    "use_bdlora": (None,),
    "use_qalora": (None, False),
    "arrow_config": (None,),
    "kasa_config": (None,),
    "monteclora_config": (None,),
}
_CHANGES_THE_BASE = ("pissa", "corda", "olora", "loftq", "lora_ga")  # PEFT subtracts their start from the weights


def write_config(directory: Path, base_name: str, arch: ModelArch, role: Role, lora: LoRA, base_digest: str) -> None:
    """Writes adapter_config.json and mrl's notes."""
    (directory / CONFIG).write_text(json.dumps(peft_config(base_name, arch, role, lora), indent=2) + "\n")
    notes = {"version": 1, "base_digest": base_digest, "lora": lora.record()}
    (directory / NOTES).write_text(json.dumps(notes, indent=2) + "\n")


@dataclass(frozen=True)
class AdapterConfig:
    """Description of the adapters in a directory.

    scores_steps: their score head scores steps; base_digest: of the base weights, if mrl wrote the adapters
    """

    scale: float
    rank: int
    dora: bool
    scores_steps: bool
    base_digest: str | None


def read_config(directory: Path) -> AdapterConfig:
    """Reads adapter_config.json and mrl's notes. Raises WeightError, which names the key, for missing settings and
    those that `merge` would compute differently from PEFT.
    """
    config = _object(directory / CONFIG)
    wrong = [
        f"{key} is {json.dumps(config.get(key))}" for key, known in _MUST_BE.items() if config.get(key) not in known
    ]
    rank, alpha = config.get("r"), config.get("lora_alpha")
    if type(rank) is not int or rank < 1 or type(alpha) not in (int, float):
        wrong.append(f"r is {json.dumps(rank)} and lora_alpha {json.dumps(alpha)}")
    init = config.get("init_lora_weights")
    if isinstance(init, str) and init.lower().startswith(_CHANGES_THE_BASE):
        wrong.append(
            f"init_lora_weights is {json.dumps(init)}, with which PEFT changes the base weights: merge with PEFT's "
            "merge_and_unload, or write plain adapters with save_pretrained's path_initial_model_for_weight_conversion"
        )
    if wrong:
        raise WeightError(f"{directory / CONFIG}: not supported: {'; '.join(wrong)}")
    assert isinstance(rank, int) and isinstance(alpha, int | float)
    lora = LoRA(rank, alpha, (), bool(config.get("use_rslora")), bool(config.get("use_dora")))
    notes = _object(directory / NOTES) if (directory / NOTES).is_file() else {}
    digest = notes.get("base_digest")
    steps = config.get("task_type") == STEPS
    return AdapterConfig(lora.scale, rank, lora.dora, steps, digest if isinstance(digest, str) else None)


def _object(file: Path) -> Mapping[str, Any]:
    try:
        content = read_json(file)
    except FileNotFoundError:
        raise WeightError(f"{file} does not exist: expected a directory of adapters in the PEFT format") from None
    except (OSError, ValueError) as error:
        raise WeightError(str(error)) from error
    if not isinstance(content, dict):
        raise WeightError(f"{file} must contain a JSON object, not {type(content).__name__}")
    return content
