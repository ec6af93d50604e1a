"""Hub tensors that contain many parameters: a row names a slice of one, `NAME[INDEX]`, along its first dimension.

Files and engines have whole tensors, under the names without brackets.
"""

from __future__ import annotations

from collections.abc import Iterable

from mrl.families.rows import MappingTable, ParameterMapping


def slice_of(name: str) -> tuple[str, int] | None:
    """Returns (stored tensor, index) of a slice's name; None for a tensor that is stored by itself."""
    whole, opened, index = name.removesuffix("]").rpartition("[")
    return (whole, int(index)) if name.endswith("]") and opened and index.isdecimal() else None


def stored_name(name: str) -> str:
    """Returns the file's name of the tensor that a row's `name` is, or is a slice of."""
    found = slice_of(name)
    return name if found is None else found[0]


def stored_shapes(rows: Iterable[ParameterMapping]) -> dict[str, tuple[int, ...]]:
    """Returns the whole shape of each stored tensor of these rows, by its name in files, in the order of the rows."""
    found: dict[str, tuple[int, ...]] = {}
    for row in rows:
        for name, shape in zip(row.hf, row.shapes, strict=True) if row.copy_of is None else ():
            whole = stored_name(name)
            found[whole] = shape if whole == name else (found.get(whole, (0,))[0] + 1, *shape)
    return found


def stacked_experts(hidden: int, ffn: int, count: int, m: str, h: str) -> MappingTable:
    """Returns the rows of `count` gated MLPs [hidden -> ffn -> hidden] with biases, stored in four hub tensors a layer.

    The matrices are transposed, gate and up interleaved. They are not tensor-parallel: Megatron would sum the biases.
    """
    rows: MappingTable = {}
    for i in range(count):
        own, theirs = f"{m}mlp.experts.local_experts.{i}.", f"{h}mlp.experts."
        up, down = f"{theirs}gate_up_proj", f"{theirs}down_proj"
        both = (2 * ffn,)
        rows |= {
            own + "linear_fc1.weight": ParameterMapping(
                "interleaved", (f"{up}[{i}]",), ((hidden, *both),), expert=True
            ),
            own + "linear_fc1.bias": ParameterMapping(
                "interleaved", (f"{up}_bias[{i}]",), (both,), expert=True, start="zeros"
            ),
            own + "linear_fc2.weight": ParameterMapping("transposed", (f"{down}[{i}]",), ((ffn, hidden),), expert=True),
            own + "linear_fc2.bias": ParameterMapping(
                "copy", (f"{down}_bias[{i}]",), ((hidden,),), expert=True, start="zeros"
            ),
        }
    return rows
