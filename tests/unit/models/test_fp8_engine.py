"""The parts of fp8 on GPUs that can be tested without one: Megatron's settings, weights held in fp8, engines in fp8."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from mrl import platform
from mrl.config.loader import load
from mrl.config.problems import ConfigError
from mrl.config.schema import FP8Config, RLConfig, RolloutConfig
from mrl.families import UnsupportedModel
from mrl.inference.sglang.command import _common
from mrl.kernels.fp8 import E4M3
from mrl.models import fp8_params
from mrl.models.mcore import TransformerConfig
from mrl.models.precision import transformer_engine_fields
from mrl.preflight.machine import check_quantization
from mrl.weights.meta import TensorMeta
from mrl.weights.sync.payload import plan_buckets
from mrl.weights.sync.quantized import QuantizedSource
from tests.helpers.bad_configs import DENSE, PPO
from tests.helpers.fake_fp8 import parameter_of

WIDE = DENSE | {"hidden_size": 256, "intermediate_size": 512, "num_key_value_heads": 4}
FP8 = ("rollout.quantization=fp8",)
GPUS = 4


@pytest.fixture(autouse=True)
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name, config in {"dense": DENSE, "wide": WIDE}.items():
        Path(name).mkdir()
        Path(name, "config.json").write_text(json.dumps(config))
        Path(name, "model.safetensors").touch()
    Path("train.jsonl").write_text('{"prompt": "21=", "answer": "12."}\n')
    Path("c.yaml").write_text(PPO.replace("path: dense", "path: wide").replace("    pipeline: 2\n", ""))


def loaded(*overrides: str, gpus: int = GPUS) -> RLConfig:
    cfg = load("c.yaml", overrides, gpus=gpus)
    assert isinstance(cfg, RLConfig)
    return cfg


@pytest.mark.parametrize("recipe", ["current", "delayed", "blockwise", "mxfp8"])
def test_megatron_is_told_the_recipe_in_its_words(recipe: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "fp8_problem", lambda name: None)
    cfg = FP8Config(recipe=recipe, first_last_bf16=0 if recipe == "delayed" else 1)  # type: ignore[arg-type]
    fields = transformer_engine_fields(cfg, "transformer_engine")
    made = TransformerConfig(num_layers=4, hidden_size=256, num_attention_heads=4, **fields)
    assert made.fp8_recipe == {"current": "tensorwise"}.get(recipe, recipe)
    assert made.fp8 == ("hybrid" if recipe in ("current", "delayed") else "e4m3")
    assert (made.fp8_amax_history_len, made.fp8_amax_compute_algo) == (1024, "max"), "Megatron's own is a history of 1"
    assert made.first_last_layers_bf16 == (recipe != "delayed") and made.num_layers_at_end_in_bf16 == 1
    assert transformer_engine_fields(FP8Config(recipe="current", emulate=True), "local") == {}
    assert transformer_engine_fields(FP8Config(), "transformer_engine") == {}
    with pytest.raises(UnsupportedModel, match=f"{recipe} needs .*transformer_engine.* local layers"):
        transformer_engine_fields(cfg, "local")


def test_a_machine_that_cannot_says_why_when_the_model_is_built() -> None:
    if platform.gpu_count():
        pytest.skip("this machine has a GPU")
    with pytest.raises(UnsupportedModel, match=r"precision.fp8.recipe: mxfp8 cannot be computed here: it needs CUDA"):
        transformer_engine_fields(FP8Config(recipe="mxfp8"), "transformer_engine")


def test_main_weights_start_from_what_was_loaded_and_not_from_what_was_drawn() -> None:
    parameter: Any = parameter_of(torch.randn(4, 8))
    values = torch.randn(4, 8)
    fp8_params.write(parameter, values)
    assert torch.equal(parameter.get_high_precision_init_val(), values)
    read = fp8_params.values_of(parameter)
    assert not torch.equal(read, values) and torch.equal(read, parameter.dequantize()) and not read.requires_grad
    parameter.clear_high_precision_init_val()  # as the optimizer does once it has copied the values
    fp8_params.write(parameter, 2 * values)
    assert torch.equal(fp8_params.values_of(parameter), 2 * read)
    plain = nn.Parameter(torch.zeros(4, 8))
    fp8_params.write(plain, values)
    assert torch.equal(plain, values) and fp8_params.values_of(plain).data_ptr() == plain.data_ptr()


REFUSED = {
    "offload of weights in fp8": (
        ["actor.precision.fp8={recipe: blockwise, params: true}", "actor.offload=all", "actor.parallel.tensor=2"],
        "actor.offload",
        ("all", "fp8 weights", "optimizer", "actor.precision.fp8.params"),
    ),
    "a copy beside weights in fp8": (
        ["actor.precision.fp8={recipe: blockwise, params: true}", "ema={}"],
        "actor.precision.fp8.params",
        ("moving average", "float32", "false"),
    ),
    "verified": ([*FP8, "sync.verify=checksum"], "sync.verify", ("checksum", "rollout.quantization")),
    "by files": ([*FP8, "sync.transport=disk"], "sync.transport", ("disk", "rollout.quantization")),
    "under ft_launcher": ([*FP8, "run.launcher=ft"], "run.launcher", ("after a restart", "rollout.quantization")),
    "transformers": (
        [*FP8, "rollout.engine=transformers"],
        "rollout.quantization",
        ("no effect", "SGLang", "transformers"),
    ),
    "given engines": ([*FP8, "rollout.urls=[http://127.0.0.1:3]"], "rollout.quantization", ("no effect",)),
    "no blocks": ([*FP8, "model.path=dense"], "rollout.quantization", ("multiples of 128", "hidden size 64")),
    "no blocks on a rank": (
        [*FP8, "rollout.tensor=4"],
        "rollout.quantization",
        ("multiples of 128", "attention's output 256", "4 ranks"),
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_engines_and_copies_cannot_have(case: str) -> None:
    overrides, key, says = REFUSED[case]
    with pytest.raises(ConfigError) as caught:
        loaded(*overrides)
    found = [problem for problem in caught.value.problems if problem.keys[0] == key]
    assert any(all(part in str(problem) for part in says) for problem in found), str(caught.value)


def test_engines_in_fp8_need_gpus() -> None:
    with pytest.raises(ConfigError, match=r"rollout.quantization: fp8 needs GPUs, and this machine has 0"):
        loaded(*FP8, gpus=0)


def test_preflight_warns_of_engines_whose_log_probs_nothing_corrects() -> None:
    (found,) = check_quantization(loaded(*FP8))
    assert found.verdict == "warning" and "algorithm.rollout_correction is off" in found.text
    assert not list(check_quantization(loaded(*FP8, "algorithm.rollout_correction.rollout_is=token")))
    assert not list(check_quantization(loaded()))


def test_the_engine_is_started_in_the_form_of_what_is_pushed() -> None:
    def words(quantization: str) -> list[str]:
        cfg = RolloutConfig(quantization=quantization)  # type: ignore[arg-type]
        place = {"seed": 0, "index": 0, "model_path": "wide", "host": "h", "port": 1, "dtype": "bfloat16"}
        spec = SimpleNamespace(cfg=cfg, arch=SimpleNamespace(family="qwen2", vision=None, max_positions=512), **place)
        return _common(spec)  # type: ignore[arg-type]

    plain, fp8 = words("none"), words("fp8")
    assert "--json-model-override-args" not in plain and "--load-format" not in plain
    override = json.loads(fp8[fp8.index("--json-model-override-args") + 1])
    assert override["quantization_config"]["weight_block_size"] == [128, 128]
    assert fp8[fp8.index("--load-format") + 1] == "dummy"


class Source:
    """Two matrices of layers, and tensors that are not quantized."""

    arch: Any = None
    names = ("model.embed_tokens.weight", "model.layers.0.self_attn.q_proj.weight", "model.layers.0.mlp.gate.weight",
             "model.layers.0.mlp.experts.1.down_proj.weight", "model.layers.0.input_layernorm.weight")  # fmt: skip

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(0)
        shapes = [(300, 200)] * 4 + [(200,)]
        self.tensors = [torch.randn(*shape, generator=generator).bfloat16() for shape in shapes]

    def metas(self) -> list[TensorMeta]:
        return [TensorMeta(n, tuple(t.shape), t.dtype, 0) for n, t in zip(self.names, self.tensors, strict=True)]

    def stream(self) -> Iterator[tuple[str, Tensor]]:
        yield from zip(self.names, self.tensors, strict=True)


def test_a_push_in_fp8_has_the_layers_matrices_in_blocks_with_their_scales() -> None:
    source = Source()
    pushed = QuantizedSource(source)
    metas, sent = list(pushed.metas()), list(pushed.stream())
    assert [(m.name, m.shape, m.dtype) for m in metas] == [(n, tuple(t.shape), t.dtype) for n, t in sent]
    cast = [name for name, tensor in sent if tensor.dtype == E4M3]
    assert cast == [source.names[1], source.names[3]]
    tensors = dict(sent)
    for name in cast:
        scales = tensors[f"{name}_scale_inv"]
        assert scales.shape == (3, 2) and scales.dtype == torch.float32
        whole = scales.repeat_interleave(128, 0)[:300].repeat_interleave(128, 1)[:, :200]
        want = dict(source.stream())[name].float()
        assert float((tensors[name].float() * whole - want).abs().max() / want.abs().max()) < 0.04
    slots = [slot for bucket in plan_buckets(metas, 1 << 16) for slot in bucket.slots]
    assert [slot.name for slot in slots] == [name for name, _ in sent]
    assert all(slot.start % slot.dtype.itemsize == 0 for slot in slots)
