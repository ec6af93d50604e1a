"""The column "GPU tested" of docs/support.md, from tools/gpu/results: python -m tools.gpu.support writes it.

A row is tested when every check behind it has passed in the committed results; then it names card, date and commit.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tools.gpu.parity import FAMILIES
from tools.gpu.run import OVER, RESULTS
from tools.gpu.stage import ROOT

PAGE = ROOT / "docs" / "support.md"
COLUMN = "GPU tested"
NOT_YET = "not yet"
FOR_CPUS = {"C kernels for CPUs, float32": "not for GPUs"}
# row of the table -> stage, and how the names of its checks begin; other rows have no check on one GPU
PROOFS: dict[str, tuple[str, tuple[str, ...]]] = {
    "Llama, Mistral, Qwen2/2.5, Qwen3, Mixtral, Qwen3-MoE": ("cuda", ("float32 is the CPU's",)),
    "`layers: local`: Megatron's, with mrl's packed attention and RMSNorm": ("cuda", ("bfloat16 is near",)),
    "`layers: transformer_engine`, grouped GEMM for experts": (
        "transformer_engine",
        ("bfloat16 is near", "against local"),
    ),
    "checkpoints between both kinds of layer": ("transformer_engine", ("a checkpoint of",)),
    "TP, SP, PP, CP, EP, DP of ranks that share one GPU, collectives through host memory": (
        "ranks",
        ("float32 agrees", "bfloat16 agrees", "a checkpoint of", "weights of"),
    ),
    "float32": ("cuda", ("float32 is the CPU's",)),
    "bfloat16 with float32 main weights and gradients": ("cuda", ("bfloat16 is near",)),
    "`run.deterministic`": ("cuda", ("the same bits",)),
    "fp8 by transformer-engine: layers and loss head": ("fp8", ("casts are", "the loss head is", "SFT in")),
    "fp8 weights, weight sync with checksum": ("fp8", ("GRPO, weights in fp8",)),
    "SFT, GRPO, PPO": ("cuda", ("SFT", "GRPO", "PPO")),
    "checkpoints, resume": ("cuda", ("resume",)),
    "transformers engine": ("cuda", ("GRPO, float32, transformers engine",)),
    "SGLang 0.5.23": ("engine", ("GRPO, bfloat16, SGLang",)),
    "weight sync by CUDA IPC, with checksum": ("engine", ("GRPO, bfloat16, SGLang",)),
    "offloading and memory release between phases of a step": ("engine", ("memory given up", "SGLang gives memory up")),
    "quickstarts of DPO, reward models, LoRA, MoE, vision, agents and diffusion": ("trainers", ("",)),
    "[a pretrained 135M model](real_model.md) learns arithmetic by GRPO with SGLang": ("real", ("GRPO of SmolLM2",)),
    "a 0.6B model, trained and sampled on one GPU": ("engine", ("GRPO of a 0.6B model",)),
}


def read(results: Path = RESULTS) -> dict[str, dict[str, Any]]:
    """stage -> what its last run has left."""
    return {file.stem: json.loads(file.read_text()) for file in sorted(results.glob("*.json"))}


def proof(row: str) -> tuple[str, tuple[str, ...]]:
    """The stage, and how the names of its checks begin; of a row that names families, theirs."""
    if row in PROOFS:
        return PROOFS[row]
    families = [family for family in FAMILIES if f"`{family}`" in row]
    kinds = ("float32 is the CPU's", "bfloat16 is near, local layers")
    return "cuda" if families else "", tuple(f"{kind}: {family}" for kind in kinds for family in families)


def cell(row: str, found: Mapping[str, Mapping[str, Any]]) -> str:
    stage, beginnings = proof(row)
    if stage not in found:
        return FOR_CPUS.get(row, NOT_YET)
    checks = [check for check in found[stage]["checks"] if check["check"].startswith(beginnings)]
    if checks and all(check["verdict"] == "passed" for check in checks):
        oldest = min((check.get("of", found[stage]) for check in checks), key=lambda of: str(of["date"]))
        return f"{oldest['card']}, {oldest['date']}, {oldest['commit'][:9]}"
    failed = [check for check in checks if check["verdict"] == "failed" and not is_cut(check)]
    return f"failed ({found[stage]['date']})" if failed else NOT_YET


def is_cut(check: Mapping[str, Any]) -> bool:
    """Whether its stage's time was over while it ran: it may hang, or have been slow."""
    return str(check.get("reason")).endswith(OVER)


def filled(text: str, found: Mapping[str, Mapping[str, Any]]) -> str:
    """The page with that column as the results have it. Raises ValueError if a row that is proved is not in it."""
    lines, rows, place = [], set(), None
    for line in text.splitlines():
        cells = [part.strip() for part in line.strip("|").split(" | ")] if line.startswith("| ") else []
        if COLUMN in cells:
            place = cells.index(COLUMN)
        elif not line:
            place = None
        elif cells and place is not None:
            rows.add(cells[0])
            cells[place] = cell(cells[0], found)
            line = f"| {' | '.join(cells)} |"
        lines.append(line)
    if missing := {*PROOFS, *FOR_CPUS} - rows:
        raise ValueError(f"{PAGE}: no row of the table is {', '.join(sorted(missing))}")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    PAGE.write_text(filled(PAGE.read_text(), read()))
