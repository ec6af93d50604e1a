"""Compares the bytes that `mrl plan` predicts with measured ones, in the tables of docs/benchmarks/planning.md.

Usage: python -m tools.plan_table [--write], about a minute of one core; --write puts the tables into that page.
The exit code is 1 if bytes of weights, gradients or optimizer differ, if saved activations differ by more than 10%, or
if a rank is built differently than planned.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
os.chdir(ROOT)  # paths in the recipes are relative to it
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402

from mrl.config.loader import load  # noqa: E402
from mrl.plan.chips import CHIPS, DEFAULT, GIB, Assumptions, Cluster  # noqa: E402
from mrl.plan.plan import machine_of, make_plan, read_shapes  # noqa: E402
from tests.helpers.plan_measured import (  # noqa: E402
    HEADED,
    LAYOUTS,
    Case,
    TinyModels,
    padded_as_on_gpus,
    saved_activations,
    state_bytes,
)
from tests.helpers.tiny import make_tiny  # noqa: E402

from mrl.plan.dry_run import rank_kinds  # noqa: E402 isort:skip (after megatron's adaptations)

PAGE = ROOT / "docs" / "benchmarks" / "planning.md"
BEGIN, END = "<!-- by tools/plan_table.py -->", "<!-- end of tools/plan_table.py -->"
TOLERANCE = 0.1
RECIPES = ("ppo_llama70b_64gpu", "ppo_llama70b_64gpu_16k")
Table = Iterator[tuple[list[str], bool]]  # cells of a row; whether plan and measurement agree
AXES = {
    "tensor": "TP", "pipeline": "PP", "virtual_pipeline": "VPP", "context": "CP", "expert": "EP",
    "expert_tensor": "ETP",
    "first_stage_layers": "first stage ", "last_stage_layers": "last stage ", "vocab_size": "vocabulary ",
    "num_key_value_heads": "key-value heads ",
}  # fmt: skip


def case_name(case: Case) -> str:
    """Returns a name such as 'qwen3: TP2 PP2 of 8 ranks'."""
    keys = [f"{AXES[key]}{value}" for key, value in (case.layout | case.model).items() if key in AXES]
    if not keys:
        return f"{case.family}: {case.world} rank"
    return f"{case.family}{', tied' if 'tied' in case.model else ''}: {' '.join(keys)} of {case.world} ranks"


def states() -> Table:
    """Yields the bytes of a rank's weights, gradients and optimizer state, where measured and planned must be equal."""
    with tempfile.TemporaryDirectory() as folder, padded_as_on_gpus():
        for number, (case, dtype) in enumerate((c, d) for c in LAYOUTS for d in (torch.bfloat16, torch.float32)):
            measured, planned = state_bytes(case, dtype, tiny_models(folder, number))
            pairs = zip(measured, planned, strict=True)
            cells = [f"{size}" if size == plan else f"{size}, planned {plan}" for size, plan in pairs]
            yield [case_name(case), dtype_name(dtype), *cells], measured == planned


def activations() -> Table:
    """Yields the bytes that autograd keeps for the backward pass, measured and planned."""
    with tempfile.TemporaryDirectory() as folder, padded_as_on_gpus():
        for number, (case, recompute, dtype, role) in enumerate(HEADED):
            measured, planned = saved_activations(case, recompute, dtype, role, tiny_models(folder, number))
            ratio = planned / measured - 1
            row = [
                case_name(case),
                role,
                dtype_name(dtype),
                recompute,
                f"{measured}",
                f"{planned:.0f}",
                f"{ratio:+.1%}",
            ]
            yield row, abs(ratio) <= TOLERANCE


def ranks() -> Table:
    """Yields every kind of rank of the largest recipes, built on the meta device."""
    for name in RECIPES:
        cfg = load(f"yaml_configs/{name}.yaml", planned=machine_of)
        machine = machine_of(cfg)
        cluster = Cluster(CHIPS[DEFAULT], machine.world_size, machine.local_world_size)
        for model in make_plan(cfg, cluster, read_shapes(cfg), Assumptions()).work.models.values():
            for kind in rank_kinds(model):
                held = kind.built.held
                row = [name, model.name, f"{kind.stage}", f"{len(kind.ranks)}", f"{held.weights}", f"{held.buffer}"]
                gib = held.gradient_bytes() / GIB, held.optimizer_bytes(model.dtype) / GIB
                trained = [f"{held.shard}", *(f"{each:.2f}" for each in gib)] if model.is_trained else ["-", "-", "-"]
                yield [*row, *trained], kind.is_right


def tiny_models(folder: str, number: int) -> TinyModels:
    return lambda *family, **settings: make_tiny(Path(folder, str(number)), *family, **settings)


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


TABLES = (
    (
        "Bytes of a rank in the middle of the world, measured on a CPU; planned: the same numbers",
        ["model and layout", "dtype", "weights", "gradients", "main weights and moments"],
        states,
    ),
    (
        "Bytes that the forward pass of a micro-batch keeps, measured on a CPU by autograd's hooks",
        ["model and layout", "role", "dtype", "recompute", "measured", "planned", "error"],
        activations,
    ),
    (
        "Every kind of rank of the 64-GPU recipes, built without memory; planned: the same numbers",
        ["recipe", "model", "stage", "ranks", "parameters", "buffer", "to update", "gradients, GiB", "optimizer, GiB"],
        ranks,
    ),
)


def lines(title: str, columns: Iterable[str], table: Table, wrong: list[str]) -> Iterator[str]:
    """Yields the lines of a Markdown table; appends rows in which plan and measurement disagree to `wrong`."""
    yield from ("", f"**{title}.**", "", f"| {' | '.join(columns)} |", f"|{'---|' * len(list(columns))}")
    for cells, agrees in table:
        if not agrees:
            wrong.append(" ".join(cells))
        yield f"| {' | '.join(cells)} |"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="write the tables into docs/benchmarks/planning.md")
    args = parser.parse_args()
    wrong: list[str] = []
    text = "\n".join(line for title, columns, table in TABLES for line in lines(title, columns, table(), wrong))
    print(text)
    if args.write:
        before, _, rest = PAGE.read_text().partition(BEGIN)
        PAGE.write_text(f"{before}{BEGIN}\n{text}\n\n{END}{rest.partition(END)[2]}")
    for row in wrong:
        print(f"plan and measurement disagree: {row}", file=sys.stderr)
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
