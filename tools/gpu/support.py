"""Writes the column "GPU tested" of docs/support.md from tools/gpu/results: python -m tools.gpu.support

A row counts as tested if every check behind it has passed in the committed results. Its cell then names card, date
and commit.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tools.gpu.parity import FAMILIES
from tools.gpu.run import RESULTS, TIMED_OUT
from tools.gpu.stage import ROOT

PAGE = ROOT / "docs" / "support.md"
COLUMN = "GPU tested"
NOT_YET = "not yet"
FOR_CPUS = {"C kernels for CPUs, float32": "not for GPUs"}
# row of the table -> stage and prefixes of the names of its checks; other rows have no check on one GPU
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
    """Returns the committed results by stage."""
    return {file.stem: json.loads(file.read_text()) for file in sorted(results.glob("*.json"))}


def proof(row: str) -> tuple[str, tuple[str, ...]]:
    """Returns the stage and the prefixes of the names of a row's checks. A row may name families instead."""
    if row in PROOFS:
        return PROOFS[row]
    families = [family for family in FAMILIES if f"`{family}`" in row]
    kinds = ("float32 is the CPU's", "bfloat16 is near, local layers")
    return "cuda" if families else "", tuple(f"{kind}: {family}" for kind in kinds for family in families)


def cell(row: str, results: Mapping[str, Mapping[str, Any]]) -> str:
    stage, prefixes = proof(row)
    if stage not in results:
        return FOR_CPUS.get(row, NOT_YET)
    checks = [check for check in results[stage]["checks"] if check["check"].startswith(prefixes)]
    if checks and all(check["verdict"] == "passed" for check in checks):
        oldest = min((check.get("of", results[stage]) for check in checks), key=lambda of: str(of["date"]))
        return f"{oldest['card']}, {oldest['date']}, {oldest['commit'][:9]}"
    # a check during which its stage timed out may be slow, so it counts as not tested
    failed = [
        check for check in checks
        if check["verdict"] == "failed" and not str(check.get("reason")).endswith(TIMED_OUT)
    ]  # fmt: skip
    return f"failed ({results[stage]['date']})" if failed else NOT_YET


def filled(text: str, results: Mapping[str, Mapping[str, Any]]) -> str:
    """Returns the page with the column filled in. Raises ValueError if a row of PROOFS or FOR_CPUS is not in it."""
    lines, rows, column = [], set(), None
    for line in text.splitlines():
        cells = [part.strip() for part in line.strip("|").split(" | ")] if line.startswith("| ") else []
        if COLUMN in cells:
            column = cells.index(COLUMN)
        elif not line:
            column = None
        elif cells and column is not None:
            rows.add(cells[0])
            cells[column] = cell(cells[0], results)
            line = f"| {' | '.join(cells)} |"
        lines.append(line)
    if missing := {*PROOFS, *FOR_CPUS} - rows:
        raise ValueError(f"{PAGE}: no row of the table has the name {', '.join(sorted(missing))}")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    PAGE.write_text(filled(PAGE.read_text(), read()))
