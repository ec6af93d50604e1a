"""Reading Megatron's checkpoint files: blocks are assembled, and every defect gives one clear error."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
import torch

from mrl.families import ModelArch, load_arch
from mrl.families.rows import ParameterMapping
from mrl.weights.disk.megatron_source import MegatronCheckpoint
from mrl.weights.disk.stored_names import UnstackedNames
from mrl.weights.disk.torch_dist_files import BlockLocation, load_metadata, write_metadata
from mrl.weights.errors import WeightError
from tests.conftest import TinyModels
from tests.helpers.slow import slow_cases

WHOLE = torch.arange(12.0).view(6, 2)
FILE = "__0_0.distcp"


def write_blocks(directory: Path, *starts: int, files: tuple[str, ...] = (FILE, FILE, FILE)) -> None:
    """Writes `w` in blocks of two rows from each of `starts`. files: the files that `.metadata` names for them"""
    items, stream = [], io.BytesIO()
    for start, file in zip(starts, files, strict=True):
        at = stream.tell()
        archive = io.BytesIO()
        torch.save(WHOLE[start : start + 2].clone(), archive)
        stream.write(archive.getvalue())
        items.append(BlockLocation("w", (start, 0), (2, 2), file, at, stream.tell() - at))
    (directory / FILE).write_bytes(stream.getvalue())
    write_metadata(directory, {"w": (WHOLE.shape, WHOLE.dtype)}, items)


@pytest.fixture(scope="module")
def arch(tiny_models: TinyModels) -> ModelArch:
    return load_arch(tiny_models("llama", weights=False))


def read(directory: Path, arch: ModelArch) -> torch.Tensor:
    table = {"w": ParameterMapping("copy", ("w",), ((6, 2),))}
    checkpoint = MegatronCheckpoint(directory, UnstackedNames(), arch, table)
    return checkpoint.source("w", (6, 2))[:]


def test_blocks_make_the_whole_tensor_in_any_order(tmp_path: Path, arch: ModelArch) -> None:
    write_blocks(tmp_path, 4, 0, 2)
    assert torch.equal(read(tmp_path, arch), WHOLE)


@pytest.mark.parametrize("starts", [(0, 1, 4), (0, 2, 3), (1, 2, 4)])
def test_a_part_there_twice_does_not_stand_for_a_missing_one(
    starts: tuple[int, ...], tmp_path: Path, arch: ModelArch
) -> None:
    write_blocks(tmp_path, *starts)
    with pytest.raises(WeightError, match=r"parts of w at \[\] are missing or duplicated"):
        read(tmp_path, arch)


@pytest.mark.parametrize("number", [0, 1, 2])
@pytest.mark.parametrize("outside", ["/tmp/outside.bin", "../outside.bin"])
def test_no_block_is_read_outside_of_the_directory(number: int, outside: str, tmp_path: Path) -> None:
    files = [FILE, FILE, FILE]
    files[number] = outside
    write_blocks(tmp_path, 0, 2, 4, files=tuple(files))
    with pytest.raises(WeightError, match=f"w points to '{outside}', outside of the directory"):
        load_metadata(tmp_path)


def test_whatever_byte_is_damaged_is_an_error_or_a_value(tmp_path: Path, arch: ModelArch) -> None:
    """Every damaged byte of a block's description gives an error or a value; the bytes are changed one at a time."""
    write_blocks(tmp_path, 0, 2, 4)
    sound = (tmp_path / FILE).read_bytes()
    begin = sound.index(b"data.pkl")
    refused = 0
    for at in range(begin, sound.index(b".format_version", begin)):
        for value in (0x00, 0x8A, *slow_cases(0x28, 0xFF)):
            (tmp_path / FILE).write_bytes(sound[:at] + bytes([value]) + sound[at + 1 :])
            try:
                read(tmp_path, arch)
            except WeightError as error:
                refused += f"{FILE}: w " in str(error)
    assert refused > 100
