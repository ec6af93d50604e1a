"""What `mrl plan` says against what is there, as docs/benchmarks/planning.md shows it.

Usage: python -m tools.plan_table [--write], about a minute of one core; --write puts the tables into that page.
Exit code 1: bytes of weights, gradients or optimizer differ, saved activations by more than 10%, or a rank is built
otherwise than planned.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
os.chdir(ROOT)  # where the recipes' paths start
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
Table = Iterator[tuple[list[str], bool]]  # cells of a row, and whether plan and measurement agree


AXES = {
    "tensor": "TP", "pipeline": "PP", "virtual_pipeline": "VPP", "context": "CP", "expert": "EP",
    "expert_tensor": "ETP",
    "first_stage_layers": "first stage ", "last_stage_layers": "last stage ", "vocab_size": "vocabulary ",
    "num_key_value_heads": "key-value heads ",
}  # fmt: skip


def _words(case: Case) -> str:
    """Such as qwen3, TP2 PP2 of 8 ranks."""
    keys = [f"{AXES[key]}{value}" for key, value in (case.layout | case.model).items() if key in AXES]
    tied = ", tied" if "tied" in case.model else ""
    return (
        f"{case.family}{tied}: {' '.join(keys)} of {case.world} ranks" if keys else f"{case.family}: {case.world} rank"
    )


def states() -> Table:
    """Bytes of a rank, measured = planned."""
    with tempfile.TemporaryDirectory() as folder, padded_as_on_gpus():
        for number, (case, dtype) in enumerate((c, d) for c in LAYOUTS for d in (torch.bfloat16, torch.float32)):
            measured, planned = state_bytes(case, dtype, _tiny(folder, number))
            both = zip(measured, planned, strict=True)
            cells = [f"{have}" if have == plan else f"{have}, planned {plan}" for have, plan in both]
            yield [_words(case), _short(dtype), *cells], measured == planned


def activations() -> Table:
    """Bytes that autograd keeps, measured and planned."""
    with tempfile.TemporaryDirectory() as folder, padded_as_on_gpus():
        for number, (case, recompute, dtype, role) in enumerate(HEADED):
            measured, planned = saved_activations(case, recompute, dtype, role, _tiny(folder, number))
            ratio = planned / measured - 1
            row = [_words(case), role, _short(dtype), recompute, f"{measured}", f"{planned:.0f}", f"{ratio:+.1%}"]
            yield row, abs(ratio) <= TOLERANCE


def ranks() -> Table:
    """Every kind of rank of the largest recipes, built on the meta device."""
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


def _tiny(folder: str, number: int) -> TinyModels:
    return lambda *family, **settings: make_tiny(Path(folder, str(number)), *family, **settings)


def _short(dtype: torch.dtype) -> str:
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
    """A Markdown table. wrong: gets what does not agree."""
    yield from ("", f"**{title}.**", "", f"| {' | '.join(columns)} |", f"|{'---|' * len(list(columns))}")
    for cells, agrees in table:
        if not agrees:
            wrong.append(" ".join(cells))
        yield f"| {' | '.join(cells)} |"


def main() -> int:
    """Prints, and writes, the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="into docs/benchmarks/planning.md")
    args = parser.parse_args()
    wrong: list[str] = []
    text = "\n".join(line for title, columns, table in TABLES for line in lines(title, columns, table(), wrong))
    print(text)
    if args.write:
        before, _, rest = PAGE.read_text().partition(BEGIN)
        PAGE.write_text(f"{before}{BEGIN}\n{text}\n\n{END}{rest.partition(END)[2]}")
    for row in wrong:
        print(f"does not agree: {row}", file=sys.stderr)
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
