"""The command `mrl convert`, and conversions that fail, are interrupted or give wrong weights: their messages and the
files that they leave."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from mrl.cli import main
from mrl.config.loader import load
from mrl.config.model_dirs import is_converted, read_converted
from mrl.config.problems import ConfigError
from mrl.families import load_arch
from mrl.families.table import weight_table
from mrl.weights.parameter_layout import TRANSFORMED, segments, to_megatron
from tests.helpers import zygote
from tests.helpers.bad_configs import SFT
from tests.helpers.tiny import FAMILIES, make_tiny

pytestmark = pytest.mark.long

ROOT = Path(__file__).parents[3]
LIMIT_S = 120
Cases = dict[str, dict[str, Any]]


def start(*command: str) -> subprocess.Popen[str]:
    """Starts `python -m *command`."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    pipe = subprocess.PIPE
    return zygote.start([sys.executable, "-m", *command], environment, ROOT, stdout=pipe, stderr=pipe, text=True)


def mrl(*arguments: str | Path) -> tuple[int, str, str]:
    """Runs the command and returns (exit code, stdout, stderr)."""
    done = zygote.run("mrl", *arguments, timeout_s=LIMIT_S)
    return done.returncode, done.stdout, done.stderr


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny(tmp_path_factory.mktemp("model") / "llama", "llama", tied=True)


@pytest.fixture(scope="module")
def converted(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Converts with two workers and `--verify`."""
    target = tmp_path_factory.mktemp("converted") / "llama"
    code, out, err = mrl("convert", "hf-to-megatron", model, target, "--workers", "2", "--verify")
    assert code == 0, err
    assert "the same model: 20 tensors" in out and "within 0.0001 " in out
    assert (target / "release" / "__1_0.distcp").is_file()
    return target


@pytest.fixture(scope="module")
def faults(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Cases:
    from transformers import AutoModelForCausalLM

    work = tmp_path_factory.mktemp("faults")
    pickled = Path(shutil.copytree(model, work / "pickled"))
    torch.save(load_file(pickled / "model.safetensors"), pickled / "pytorch_model.bin")
    (pickled / "model.safetensors").unlink()
    moe = make_tiny(work / "moe", "mixtral")
    AutoModelForCausalLM.from_pretrained(moe).save_pretrained(work / "fused", save_original_format=False)
    process = start("tests.worlds.convert_faults", *map(str, (work, model, pickled, work / "fused", moe)))
    out, err = process.communicate(timeout=5 * LIMIT_S)
    assert process.returncode == 0, err[-6000:]
    return {case["case"]: case for case in map(json.loads, filter(None, out.splitlines()))}


def test_back_by_the_command(model: Path, converted: Path, tmp_path: Path) -> None:
    code, out, err = mrl("convert", "megatron-to-hf", converted, tmp_path / "hf", "--verify", "--skip-logits")
    assert code == 0, err
    assert "the same model" in out and "logits not compared" in out
    assert (tmp_path / "hf" / "model.safetensors").is_file()
    assert {path.name for path in model.iterdir()} == {path.name for path in (tmp_path / "hf").iterdir()}


def test_what_a_converted_model_records_is_not_said_again(model: Path, converted: Path, tmp_path: Path) -> None:
    code, _, err = mrl("verify", model, converted, "--skip-logits", "--role", "critic")
    assert code == 1 and f"{converted} is recorded as a policy, and not as a critic: leave --role out" in err
    code, _, err = mrl("convert", "megatron-to-hf", converted, tmp_path / "hf", "--model-files", model)
    assert code == 1 and f"{converted} has its own config.json and tokenizer: leave --model-files out" in err


@pytest.mark.parametrize("size", ["nan", "inf", "1e300", "0", "-1"])
def test_files_have_a_size_that_a_file_can_have(size: str, capsys: pytest.CaptureFixture[str]) -> None:
    for command in (["convert", "megatron-to-hf"], ["merge", "base"]):
        with pytest.raises(SystemExit):
            main([*command, "source", "target", f"--shard-gb={size}"])
        assert f"--shard-gb: {size}: must be a number of gigabytes above 0" in capsys.readouterr().err


def test_settings_of_other_conversions_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    adapter = ["megatron-to-hf", "--adapter"]
    for arguments in (["hf-to-megatron", "--shard-gb=1"], [*adapter, "--shard-gb=1"], [*adapter, "--workers=2"]):
        assert main(["convert", *arguments, str(tmp_path / "source"), str(tmp_path / "target")]) == 1
        said, name = capsys.readouterr().err, arguments[-1].partition("=")[0]
        assert f"{name} has no effect on" in said or f"without {name}" in said


def test_the_verdict_is_the_exit_status(tmp_path: Path, converted: Path) -> None:
    other = make_tiny(tmp_path / "other", "llama", tied=True, seed=1)
    code, out, _ = mrl("verify", other, converted, "--json")
    verdict = json.loads(out)
    assert code == 1 and verdict["same"] is False and verdict["logits"] is None
    assert all(group["different"] for group in verdict["groups"])


def test_the_tool_is_the_command(tmp_path: Path) -> None:
    process = start("tools.convert_checkpoint", "hf-to-megatron", str(tmp_path), str(tmp_path / "x"))
    _, err = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 1 and "config.json does not exist" in err


@pytest.mark.parametrize("direction", ["hf-to-megatron", "megatron-to-hf"])
def test_a_killed_conversion_leaves_nothing_that_looks_whole(
    direction: str, model: Path, converted: Path, tmp_path: Path
) -> None:
    source, target = model if direction == "hf-to-megatron" else converted, tmp_path / "target"
    process = start("tests.worlds.halted_conversion", "convert", direction, str(source), str(target))
    assert process.stdout is not None and process.stdout.readline() == "half\n"
    process.send_signal(signal.SIGKILL)
    process.communicate(timeout=LIMIT_S)
    partial = tmp_path / ".target.partial"
    assert not target.exists() and partial.is_dir()
    assert not (partial / "config.json").exists()
    with pytest.raises(ValueError, match="is incomplete"):
        read_converted(partial)


def test_ctrl_c_clears_away_what_was_written(model: Path, tmp_path: Path) -> None:
    process = start("tests.worlds.halted_conversion", "convert", "hf-to-megatron", str(model), str(tmp_path / "target"))
    assert process.stdout is not None and process.stdout.readline() == "half\n"
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=LIMIT_S)
    assert (process.returncode, err) == (130, "mrl: stopped by Ctrl-C\n")
    assert list(tmp_path.iterdir()) == []


def test_a_configuration_may_name_a_converted_model(converted: Path, tmp_path: Path) -> None:
    assert is_converted(converted)
    accepts(converted, tmp_path)
    cut_off = Path(shutil.copytree(converted, tmp_path / "cut_off"))
    shard = cut_off / "release" / "__1_0.distcp"
    shard.write_bytes(shard.read_bytes()[:-1])
    with pytest.raises(ConfigError, match=r"model\.path: .*damaged: release/__1_0\.distcp has \d+ bytes"):
        accepts(cut_off, tmp_path)
    unfinished = Path(shutil.copytree(converted, tmp_path / "unfinished"))
    (unfinished / "complete").unlink()
    with pytest.raises(ConfigError, match=r"model\.path: .*is incomplete"):
        accepts(unfinished, tmp_path)


def accepts(model: Path, folder: Path) -> None:
    (folder / "train.jsonl").write_text('{"prompt": "21=", "answer": "12."}\n')
    (folder / "c.yaml").write_text(SFT)
    overrides = [f"model.path={model}", "model.from_scratch=false", f"data.train={folder}/train.jsonl"]
    load(folder / "c.yaml", overrides, gpus=0)


@pytest.mark.parametrize("family", FAMILIES)
def test_segments_tell_what_to_megatron_does(family: str, tiny_models: Callable[..., Path]) -> None:
    """`segments`, which names source rows without a tensor, gives the same rows as `to_megatron`."""
    arch = load_arch(tiny_models(family, weights=False))
    for name, row in weight_table(arch).items():
        if row.kind in TRANSFORMED:
            assert not list(segments(row, arch)), "columns become rows: it moves no whole rows"
            continue
        sources = [torch.randn(shape) for shape in row.shapes]
        told = torch.cat([sources[part.source][part.start : part.start + part.rows] for part in segments(row, arch)])
        assert torch.equal(told, to_megatron(row, sources, arch)), name


def test_leftovers_on_either_side_are_listed(faults: Cases) -> None:
    there = faults["leftovers to megatron"]
    assert "no tensor model.layers.1.mlp.up_proj.weight" in there["error"]
    assert "the model does not use its tensor model.layers.9.mlp.up_proj.weight" in there["error"]
    assert "model.norm.weight has shape [5], and config.json requires [64]" in there["error"]
    back = faults["leftovers to hf"]
    assert "the model does not use its tensor decoder.layers.surplus.weight" in back["error"]
    assert "no tensor decoder.layers.mlp.linear_fc2.weight, which holds model.layers.0.mlp" in back["error"]
    assert "parts of decoder.layers.self_attention.linear_qkv.weight at [1] are missing" in back["error"]
    assert there["left"] == back["left"] == []


@pytest.mark.parametrize(
    ("case", "said"),
    [
        ("nan", "model.safetensors: model.layers.1.self_attn.k_proj.weight contains NaN or infinity"),
        ("inf", "model.safetensors: model.layers.1.self_attn.k_proj.weight contains NaN or infinity"),
        ("untied", "model.safetensors: lm_head.weight differs from model.embed_tokens.weight"),
    ],
)
def test_what_would_be_wrong_in_silence_is_not_converted(faults: Cases, case: str, said: str) -> None:
    assert said in faults[f"{case} to megatron"]["error"] and faults[f"{case} to megatron"]["left"] == []


def test_a_cast_that_makes_values_infinite_is_refused(faults: Cases) -> None:
    said = "model.norm.weight has values beyond the range of torch.float16: they would become infinite"
    assert said in faults["too large for float16"]["error"]


@pytest.mark.parametrize(
    ("case", "text"),
    [
        ("truncated safetensors", "model.safetensors: not a complete safetensors file"),
        ("truncated distcp", "is damaged: release/__0_0.distcp has"),
        ("nothing there", "is not a Megatron checkpoint"),
        ("no marker", "is incomplete: it has no file 'complete'"),
        ("garbled distcp", "__0_0.distcp: embedding.word_embeddings.weight cannot be read"),
        ("garbled metadata", ".metadata is not the description of a checkpoint"),
        ("pickle refused", "pickled weights can run code"),
        ("code in a pickle", "cannot be read as plain tensors"),
        ("code in metadata", "it names pathlib.Path.touch, which does not describe a tensor"),
        ("metadata leaves", "points to '../../outside.distcp', outside of the directory"),
        ("index leaves", "points to '../outside.safetensors', outside of the directory"),
        ("no room to megatron", "MB needed, 1 KB free"),
        ("no room to hf", "MB needed, 1 KB free"),
        ("disk fills to megatron", "__0_0.distcp failed: [Errno 27] File too large"),
        ("disk fills to hf", "[Errno 27] File too large"),
        ("disk fills in a large block", "__0_0.distcp failed: [Errno 27] File too large"),
        ("disk fills in workers", "[Errno 27] File too large"),
        ("mixed", "decoder.layers.mlp.linear_fc1.weight (torch.bfloat16, torch.float32)"),
    ],
)
def test_what_cannot_be_converted_says_why_and_leaves_nothing(faults: Cases, case: str, text: str) -> None:
    assert text in faults[case]["error"]
    assert faults[case]["left"] == []
    assert not faults[case].get("ran"), "code ran"


def test_pickled_weights_are_read_if_asked_for(faults: Cases) -> None:
    assert faults["pickle allowed"]["error"] == "" and faults["pickle allowed"]["verdict"]["same"]


def test_a_target_is_not_overwritten_nor_written_twice_at_once(faults: Cases) -> None:
    assert "exists and is not empty" in faults["taken"]["error"] and faults["taken"]["kept"]
    assert "another process is writing there" in faults["busy"]["error"]


def test_what_a_killed_process_left_is_removed(faults: Cases) -> None:
    assert faults["stale"]["error"] == "" and faults["stale"]["left"] == ["target"]
    assert "model.safetensors" not in faults["stale"]["files"] and "complete" in faults["stale"]["files"]


def test_another_dtype(faults: Cases) -> None:
    verdict = faults["cast"]["verdict"]
    assert verdict["same"] and verdict["dtypes"] == [["float32", "bfloat16"]]
    assert faults["cast back"]["config"] == "bfloat16" and faults["cast back"]["dtypes"] == ["torch.bfloat16"]
    assert faults["mixed, one chosen"]["error"] == ""


def test_verify_finds_a_flipped_bit(faults: Cases) -> None:
    assert faults["a flipped bit"]["different"] == ["model.layers.1.mlp.down_proj.weight: 1 of 8192 values"]
    assert not faults["a flipped bit"]["same"]


def test_verify_computes_with_what_it_compares(faults: Cases) -> None:
    """`--verify` compares logits too: the tensors are equal, but the rotary base differs."""
    case = faults["other rope"]
    assert case["different"] == case["problems"] == [] and not case["same"]
    assert case["logits"]["error"] > 1e-2 * case["logits"]["scale"]


def test_verify_finds_what_nothing_takes(faults: Cases) -> None:
    assert not faults["surplus"]["same"]
    assert any("the model does not use its tensor model.extra" in problem for problem in faults["surplus"]["problems"])


def test_fused_experts_and_several_workers(faults: Cases) -> None:
    assert faults["fused"]["error"] == "" and faults["fused"]["verdict"]["same"]
    workers = faults["workers"]
    assert workers["equal"] and workers["verdict"]["same"]
    assert workers["files"] == [f"release/__{number}_0.distcp" for number in range(3)]


def test_memory_does_not_grow_with_the_model(faults: Cases) -> None:
    """Peak memory stays below a fifth of the model: buckets of 1 MB, a model of 84 MB."""
    assert all(grown < 0.2 * faults["memory"]["model"] for grown in faults["memory"]["grown"])
