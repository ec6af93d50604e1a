"""Tensors of the hub's files that many parameters are in: a row names a slice of one, `NAME[INDEX]`, along its first
dimension. What reads and writes files and engines has whole tensors, by the names without brackets."""

from __future__ import annotations

from collections.abc import Iterable

from mrl.families.rows import Row, Table


def slice_of(name: str) -> tuple[str, int] | None:
    """(stored tensor, index) of a slice's name; None for the name of a tensor that is stored by itself."""
    whole, opened, index = name.removesuffix("]").rpartition("[")
    return (whole, int(index)) if name.endswith("]") and opened and index.isdecimal() else None


def stored_name(name: str) -> str:
    """What files call the tensor that a row's `name` is, or is a slice of."""
    found = slice_of(name)
    return name if found is None else found[0]


def stored_shapes(rows: Iterable[Row]) -> dict[str, tuple[int, ...]]:
    """The whole shape of each tensor that files have of these rows, by its name there, in the order of the rows."""
    found: dict[str, tuple[int, ...]] = {}
    for row in rows:
        for name, shape in zip(row.hf, row.shapes, strict=True) if row.copy_of is None else ():
            whole = stored_name(name)
            found[whole] = shape if whole == name else (found.get(whole, (0,))[0] + 1, *shape)
    return found


def stacked_experts(hidden: int, ffn: int, count: int, m: str, h: str) -> Table:
    """Rows of `count` gated MLPs [hidden -> ffn -> hidden] with biases, which the hub has in four tensors a layer:
    matrices the other way round, gate and up in turns. No rank has a part of one: Megatron would add biases up."""
    rows: Table = {}
    for i in range(count):
        own, theirs = f"{m}mlp.experts.local_experts.{i}.", f"{h}mlp.experts."
        up, down = f"{theirs}gate_up_proj", f"{theirs}down_proj"
        both = (2 * ffn,)
        rows |= {
            own + "linear_fc1.weight": Row("interleaved", (f"{up}[{i}]",), ((hidden, *both),), expert=True),
            own + "linear_fc1.bias": Row("interleaved", (f"{up}_bias[{i}]",), (both,), expert=True, start="zeros"),
            own + "linear_fc2.weight": Row("transposed", (f"{down}[{i}]",), ((ffn, hidden),), expert=True),
            own + "linear_fc2.bias": Row("copy", (f"{down}_bias[{i}]",), ((hidden,),), expert=True, start="zeros"),
        }
    return rows
