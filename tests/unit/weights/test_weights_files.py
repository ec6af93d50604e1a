"""Reading Hugging Face weight files: slices, and a clear error for every defect."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from mrl.families import ExpertArch, load_arch
from mrl.families.table import weight_table
from mrl.weights.agreement import MAX_LISTED, raise_together
from mrl.weights.disk.hf_rows import parameter_rows
from mrl.weights.disk.mxfp4 import unpacked
from mrl.weights.disk.safetensors_io import HFCheckpoint
from mrl.weights.disk.unused import unused_tensors
from mrl.weights.errors import WeightError
from mrl.weights.meta import TensorMeta  # noqa: E402
from mrl.weights.model.export import plan_files, save_hf
from mrl.weights.parameter_layout import to_megatron
from tests.conftest import TinyModels
from tests.helpers.full_disk import full_disk

A, B = torch.arange(24.0).view(2, 3, 4), torch.arange(6.0)


def write_indexed(path: Path, **weight_map: str) -> Path:
    save_file({"a": A}, path / "one.safetensors")
    save_file({"b": B}, path / "two.safetensors")
    where = {"a": "one.safetensors", "b": "two.safetensors", **weight_map}
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))
    return path


def test_single_file_and_index_read_the_same(tmp_path: Path) -> None:
    single = tmp_path / "single"
    single.mkdir()
    save_file({"a": A, "b": B}, single / "model.safetensors")
    for path in (single, write_indexed(tmp_path)):
        with HFCheckpoint(path) as checkpoint:
            assert set(checkpoint) == {"a", "b"} and len(checkpoint) == 2
            assert torch.equal(checkpoint.source("a", (2, 3, 4))[:, 1:3], A[:, 1:3])
            assert torch.equal(checkpoint.source("b")[:], B)


def test_a_single_file_beside_the_index_of_other_files_is_refused(tmp_path: Path) -> None:
    """transformers would read the single file, and engines the files of the index."""
    write_indexed(tmp_path)
    save_file({"a": A + 1, "b": B}, tmp_path / "model.safetensors")
    with pytest.raises(
        WeightError, match=r"both model\.safetensors and model\.safetensors\.index\.json, which names one"
    ):
        HFCheckpoint(tmp_path)
    write_indexed(tmp_path, a="model.safetensors", b="model.safetensors")
    with HFCheckpoint(tmp_path) as checkpoint:
        assert torch.equal(checkpoint.source("a")[:], A + 1)


def test_a_tensor_in_two_files_of_an_index_is_refused(tmp_path: Path) -> None:
    """transformers would read the copy in the last file, whatever the index says."""
    write_indexed(tmp_path)
    save_file({"a": A + 1, "b": B}, tmp_path / "two.safetensors")
    says = r"two\.safetensors: it has a tensor a, which the index places in one\.safetensors"
    with HFCheckpoint(tmp_path) as checkpoint:
        for read in (lambda: checkpoint.source("b"), lambda: checkpoint.locate("b", (6,))):
            with pytest.raises(WeightError, match=says):
                read()


def test_a_block_of_a_tensor_reads_like_a_tensor(tmp_path: Path) -> None:
    with HFCheckpoint(write_indexed(tmp_path)) as checkpoint:
        block = checkpoint.source("a").narrow(((1, 2), (1, 3), (0, 4)), dims=2)
        want = A[1, 1:3]
        assert block.shape == (2, 4)
        assert torch.equal(block[:], want) and torch.equal(block[1:2], want[1:2])
        assert torch.equal(block[:, 2:], want[:, 2:])


def test_a_broken_file_is_only_opened_when_it_is_needed(tmp_path: Path) -> None:
    write_indexed(tmp_path)
    (tmp_path / "two.safetensors").write_bytes(b"no")
    with HFCheckpoint(tmp_path) as checkpoint:
        assert torch.equal(checkpoint.source("a")[:], A)
        with pytest.raises(WeightError, match=r"two\.safetensors: not a complete safetensors file"):
            checkpoint.source("b")


@pytest.mark.parametrize("keep", [4, 60, -5])
def test_truncated_file(tmp_path: Path, keep: int) -> None:
    save_file({"a": A}, tmp_path / "model.safetensors")
    whole = (tmp_path / "model.safetensors").read_bytes()
    (tmp_path / "model.safetensors").write_bytes(whole[:keep])
    with pytest.raises(WeightError, match=r"model\.safetensors.*truncated or damaged"):
        HFCheckpoint(tmp_path)


def test_missing_file_of_an_index(tmp_path: Path) -> None:
    (write_indexed(tmp_path) / "two.safetensors").unlink()
    with HFCheckpoint(tmp_path) as checkpoint, pytest.raises(WeightError, match=r"two\.safetensors does not exist"):
        checkpoint.source("b")


def test_missing_tensors(tmp_path: Path) -> None:
    with HFCheckpoint(write_indexed(tmp_path, c="one.safetensors")) as checkpoint:
        with pytest.raises(WeightError, match="no tensor d$"):
            checkpoint.source("d")
        with pytest.raises(WeightError, match=r"one\.safetensors: it has no tensor c, which the index places there"):
            checkpoint.source("c")


def test_wrong_shape_and_dtype(tmp_path: Path) -> None:
    save_file({"a": A, "i": torch.arange(3, dtype=torch.int8)}, tmp_path / "model.safetensors")
    with HFCheckpoint(tmp_path) as checkpoint:
        with pytest.raises(WeightError, match=r"a has shape \[2, 3, 4\], and config.json requires \[6, 4\]"):
            checkpoint.source("a", (6, 4))
        with pytest.raises(WeightError, match="i is I8; supported"):
            checkpoint.source("i")


@pytest.mark.parametrize("file", ["../one.safetensors", "/etc/passwd", "x/../../one.safetensors", ""])
def test_no_index_leaves_its_directory(tmp_path: Path, file: str) -> None:
    inner = tmp_path / "inner"
    inner.mkdir()
    save_file({"b": B}, tmp_path / "one.safetensors")
    with pytest.raises(WeightError, match="outside of the directory"):
        HFCheckpoint(write_indexed(inner, b=file))


@pytest.mark.parametrize("text", ["{", "[]", '{"weight_map": 3}', "{}"])
def test_unreadable_index(tmp_path: Path, text: str) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(text)
    with pytest.raises(WeightError, match="not a weight index"):
        HFCheckpoint(tmp_path)


def test_no_weights(tmp_path: Path) -> None:
    with pytest.raises(WeightError, match=r"neither model\.safetensors\.index\.json nor model\.safetensors"):
        HFCheckpoint(tmp_path)
    with pytest.raises(WeightError, match="not a directory"):
        HFCheckpoint(tmp_path / "nowhere")


class Payload:
    """Runs code when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return Path.touch, (self.path,)


def test_pickle_is_refused_unless_asked_for(tmp_path: Path) -> None:
    torch.save({"a": A, "b": B}, tmp_path / "pytorch_model.bin")
    with pytest.raises(WeightError, match=r"pytorch_model\.bin: pickled.*allow_pickle"):
        HFCheckpoint(tmp_path)
    with HFCheckpoint(tmp_path, allow_pickle=True) as checkpoint:
        assert torch.equal(checkpoint.source("a")[1:], A[1:])


def test_pickle_never_runs_code(tmp_path: Path) -> None:
    torch.save({"a": Payload(tmp_path / "ran")}, tmp_path / "pytorch_model.bin")
    with pytest.raises(WeightError, match="cannot be read as plain tensors"):
        HFCheckpoint(tmp_path, allow_pickle=True)
    assert not (tmp_path / "ran").exists()


def test_a_safetensors_index_cannot_smuggle_a_pickle_in(tmp_path: Path) -> None:
    torch.save({"b": B}, tmp_path / "x.bin")
    with pytest.raises(WeightError, match="a file of another format"):
        HFCheckpoint(write_indexed(tmp_path, b="x.bin"))


def test_problems_are_listed_once_and_not_without_end() -> None:
    raise_together([], "nothing")
    with pytest.raises(WeightError) as caught:
        raise_together([f"p{i % 50}" for i in range(100)], "loading")
    text = str(caught.value)
    assert text.startswith("loading:\n  - p0\n") and text.endswith(f"and {50 - MAX_LISTED} more")


def test_files_of_bounded_size_and_one_sender() -> None:
    metas = [TensorMeta(f"t{i}", (256,), torch.float32, sender) for i, sender in enumerate([0, 0, 0, 1, 1])]
    metas.append(TensorMeta("large", (4096,), torch.float32, 1))
    files = plan_files(metas, max_bytes=2048)
    assert [[meta.name for meta in file.tensors] for file in files] == [["t0", "t1"], ["t2"], ["t3", "t4"], ["large"]]
    assert [file.sender for file in files] == [0, 0, 1, 1]
    assert files[0].name == "model-00001-of-00004.safetensors"
    assert [file.name for file in plan_files(metas[:2], max_bytes=1 << 20)] == ["model.safetensors"]


class OneRank:
    """The parts of an exporter that writing a directory needs, on one rank."""

    role = "policy"

    def __init__(self, tensors: dict[str, torch.Tensor], model: Path) -> None:
        self.tensors, self.arch = tensors, load_arch(model)

    def metas(self) -> list[TensorMeta]:
        return [TensorMeta(name, tuple(t.shape), t.dtype, 0) for name, t in self.tensors.items()]

    def stream(self) -> Any:
        return iter(self.tensors.items())


@pytest.mark.parametrize(("room", "file_bytes"), [(20, 200), (180, 200), (900, 1 << 20)])
def test_an_export_that_finds_the_disk_full_leaves_what_was_there(
    tmp_path: Path, tiny_models: Any, room: int, file_bytes: int
) -> None:
    """An export that fills the disk leaves the old files intact: in the weights, their index, or copied files."""
    source = tiny_models("llama", weights=False)
    exporter, target = OneRank({"a": torch.zeros(8), "b": torch.zeros(8)}, source), tmp_path / "hf"
    save_hf(exporter, source, target, max_file_bytes=file_bytes)  # type: ignore[arg-type]
    before = {file.name: file.read_bytes() for file in target.iterdir()}
    exporter.tensors = {"a": torch.ones(8), "b": torch.ones(8)}
    for overwrite in (True, False):
        with full_disk(room), pytest.raises(WeightError, match="File too large|exists and is not empty"):
            save_hf(exporter, source, target, max_file_bytes=file_bytes, overwrite=overwrite)  # type: ignore[arg-type]
        assert {file.name: file.read_bytes() for file in target.iterdir()} == before
        assert [path.name for path in tmp_path.iterdir()] == ["hf"]
    save_hf(exporter, source, target, max_file_bytes=file_bytes, overwrite=True)  # type: ignore[arg-type]
    with HFCheckpoint(target) as checkpoint:
        assert torch.equal(checkpoint.source("b")[:], torch.ones(8))
    assert [path.name for path in tmp_path.iterdir()] == ["hf"]


def test_a_slice_has_a_name_of_its_own(tmp_path: Path) -> None:
    with HFCheckpoint(write_indexed(tmp_path)) as checkpoint:
        assert "a[1]" in checkpoint and "c[1]" not in checkpoint
        assert torch.equal(checkpoint.source("a[1]", (3, 4))[1:], A[1, 1:])
        assert checkpoint.locate("a[1]", (3, 4))[1] - checkpoint.locate("a[0]", (3, 4))[1] == A[0].nbytes  # type: ignore[index]
        for wrong, shape, named in (("a[2]", (3, 4), "slice 2"), ("a[1]", (4, 3), r"\[4, 3\]")):
            for ask in (checkpoint.source, checkpoint.locate):
                with pytest.raises(WeightError, match=rf"one.safetensors: a has shape \[2, 3, 4\].*{named}"):
                    ask(wrong, shape)


def test_numbers_of_four_bits_are_those_of_the_format(tmp_path: Path) -> None:
    """Decoded 4-bit numbers equal the format's in float64: every pair of the 16 values with every scale. What bfloat16
    cannot represent is infinite, and a NaN scale gives NaN."""
    positive = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
    values = torch.tensor(positive + [-value for value in positive], dtype=torch.float64)
    pairs = torch.arange(256, dtype=torch.uint8).view(16, 16)  # one row: 16 bytes, the lower half first
    blocks = pairs[:, None].expand(16, 256, 16).contiguous()
    scales = torch.arange(256, dtype=torch.uint8).expand(16, 256).contiguous()
    wide = torch.stack([values[(pairs & 15).int()], values[(pairs >> 4).int()]], -1).flatten(1)
    exact = (wide[:, None] * 2.0 ** (torch.arange(256, dtype=torch.float64) - 127)[None, :, None]).flatten(1)
    got = unpacked(blocks, scales)
    is_number = (torch.arange(256) != 255).repeat_interleave(32).expand(16, -1)
    assert torch.equal(got[is_number], exact[is_number].to(torch.bfloat16)) and got[~is_number].isnan().all()
    assert torch.equal(got[is_number & (exact.abs() < 2.0**128)].double(), exact[is_number & (exact.abs() < 2.0**128)])

    both = {"x_blocks": blocks[None].repeat(2, 1, 1, 1), "x_scales": scales.flip(0)[None].repeat(2, 1, 1)}
    save_file(both, tmp_path / "model.safetensors")
    with HFCheckpoint(tmp_path) as checkpoint:
        assert "x[1]" in checkpoint and checkpoint.locate("x[1]", (8192, 16)) is None
        assert torch.equal(checkpoint.source("x[1]", (8192, 16))[32:320], unpacked(blocks, scales).t()[32:320])
        with pytest.raises(WeightError, match=r"x_blocks has \(8192, 16\) each, and config.json requires \(16, 8192\)"):
            checkpoint.source("x[1]", (16, 8192))
        with pytest.raises(WeightError, match="x_blocks has shape"):
            checkpoint.source("x[2]", (8192, 16))


def test_packed_experts_are_those_that_transformers_unpacks(tiny_models: TinyModels, tmp_path: Path) -> None:
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    model, draw = tiny_models("gpt_oss"), torch.Generator().manual_seed(0)
    weights, plain = load_file(model / "model.safetensors"), {}
    for name in [name for name in weights if name.endswith("experts.gate_up_proj")]:
        count, columns, rows = weights.pop(name).shape
        blocks = torch.randint(0, 256, (count, rows, columns // 32, 16), dtype=torch.uint8, generator=draw)
        scales = torch.randint(118, 130, (count, rows, columns // 32), dtype=torch.uint8, generator=draw)
        weights |= {name + "_blocks": blocks, name + "_scales": scales}
        plain[name] = convert_moe_packed_tensors(blocks, scales)
    save_file(weights, tmp_path / "model.safetensors")
    arch = load_arch(model)
    table = weight_table(arch)
    with HFCheckpoint(tmp_path) as checkpoint:
        assert list(unused_tensors(checkpoint, arch, table, "policy")) == []
        fewer = replace(arch, experts=ExpertArch(3, 2))
        said = list(unused_tensors(checkpoint, fewer, weight_table(fewer), "policy"))
        assert any("gate_up_proj has more than the 3 slices" in each for each in said), said
        for name, row in table.items():
            if row.kind == "interleaved" and name.endswith("weight"):
                whole, _, number = row.hf[0].partition("[")
                want = to_megatron(row, [plain[whole][int(number[:-1])]], arch)
                assert torch.equal(to_megatron(row, [checkpoint.source(row.hf[0], row.shapes[0])], arch), want)
                rows = parameter_rows(checkpoint, row, arch, allow_pickle=False)
                out = torch.empty(5, rows.shape[1])
                rows.read(3, out)
                assert torch.equal(out, want[3:8].float())


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
def test_two_forms_of_the_same_weights_are_refused(tiny_models: TinyModels, tmp_path: Path, family: str) -> None:
    """Experts that a file has both one by one and joined, or both plain and packed, may differ."""
    model = shutil.copytree(tiny_models(family), tmp_path / "model")
    weights, experts = load_file(model / "model.safetensors"), "model.layers.1.mlp.experts."
    form, other = experts + "gate_up_proj_blocks", torch.zeros(4, 192, 2, 16, dtype=torch.uint8)
    if family == "qwen3_moe":
        form, other = experts + "gate_up_proj", torch.zeros(4, 128, 64)
    save_file(weights | {form: other}, model / "model.safetensors")
    arch = load_arch(model)
    with HFCheckpoint(model) as checkpoint:
        (problem,) = unused_tensors(checkpoint, arch, weight_table(arch), "policy")
    assert f"{form} and {experts}" in problem and problem.endswith("two forms of the same weights: remove one of them")
