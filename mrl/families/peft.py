"""PEFT's form of adapters: the prefix of their names, and the configuration file."""

from __future__ import annotations

from typing import Any

from mrl.families.adapters import LoRA, adapter_table, part_of
from mrl.families.arch import ModelArch
from mrl.families.table import HF_VALUE_HEAD, Role

STEPS = "TOKEN_CLS"  # the task of a head that scores steps
PREFIX = "base_model.model."  # of every tensor's name


def peft_config(base_name: str, arch: ModelArch, role: Role, lora: LoRA) -> dict[str, Any]:
    """Returns the content of adapter_config.json. base_name: the model's name, not a path of this machine."""
    trained = [row.hf[0] for row in adapter_table(arch, role, lora).values() if row.hf != (HF_VALUE_HEAD,)]
    parts = {part_of(name.partition(".lora_")[0]) for name in trained}
    alpha = lora.scale * lora.rank
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM" if role == "policy" else STEPS if arch.scores_steps else "SEQ_CLS",
        "base_model_name_or_path": base_name,
        "r": lora.rank,
        "lora_alpha": int(alpha) if alpha.is_integer() else alpha,
        "lora_dropout": 0.0,
        "target_modules": sorted(parts),
        "modules_to_save": None if role == "policy" else ["score"],
        "use_rslora": False,
        "use_dora": lora.dora,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
    }
