"""LoRA adapters synced to SGLang without merging: it computes what the trainer computes."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from mrl.config.loader import load
from mrl.config.schema import LoRAConfig, RLConfig, SyncConfig
from mrl.core import Prompt, Request, Sample, SamplingParams
from mrl.families import ModelArch, load_arch
from mrl.families.adapters import LoRA, adapter_table
from mrl.families.peft import PREFIX
from mrl.inference.engine import Engine
from mrl.inference.errors import EngineError
from mrl.inference.launch import started_with
from mrl.inference.protocol import Endpoint, read_adapters
from mrl.inference.seeds import sample_seed
from mrl.inference.start import start_engine
from mrl.weights.disk import adapter_files
from mrl.weights.errors import SyncError, SyncMismatch
from mrl.weights.meta import TensorMeta
from mrl.weights.sync.adapter import AdapterSource, AdapterSync, missing_adapters
from mrl.weights.sync.payload import pickle_by_name
from tests.conftest import TinyModels
from tests.helpers.runs import results
from tests.helpers.sync_tools import FileExporter
from tests.helpers.train_tools import Train, given, write_config

pytestmark = [
    pytest.mark.long,
    pytest.mark.engine,
    pytest.mark.skipif(importlib.util.find_spec("sglang") is None, reason="the engine tests need sglang"),
]
LORA: dict[str, Any] = {"rank": 3, "alpha": 6, "rslora": True, "targets": ["q_proj", "up_proj", "down_proj"]}
SPEC = LoRAConfig.model_validate(LORA | {"targets": tuple(LORA["targets"])}).spec
LOG_PROB_TOLERANCE = 1e-4


class RandomAdapters:
    """Random adapters, as an exporter provides them."""

    def __init__(self, model: Path, seed: int, lora: LoRA = SPEC) -> None:
        self.arch: ModelArch = load_arch(model)
        stream = torch.Generator().manual_seed(seed)
        shapes = {row.hf[0]: row.shapes[0] for row in adapter_table(self.arch, "policy", lora).values()}
        self.tensors = {name: 0.2 * torch.randn(shape, generator=stream) for name, shape in shapes.items()}

    def metas(self) -> list[TensorMeta]:
        return [TensorMeta(name, tuple(tensor.shape), tensor.dtype, 0) for name, tensor in self.tensors.items()]

    def stream(self) -> Iterator[tuple[str, Tensor]]:
        yield from self.tensors.items()


@pytest.fixture(scope="module")
def model(tiny_models: TinyModels) -> Path:
    return tiny_models("qwen2", tied=True)


@pytest.fixture(scope="module")
def config(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_config(
        tmp_path_factory.mktemp("adapter_runs"),
        model,
        actor={"parallel": {"tensor": 2, "pipeline": 2}, "optimizer": {"lr": 3e-2}, "lora": LORA},
        algorithm={"adv_estimator": "grpo", "kl": {"use_in_loss": True, "coef": 0.01}},
        sync={"lora": "adapter", "verify": "checksum"},
    )


@pytest.fixture(scope="module")
def engine(model: Path, config: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    cfg = load(config)
    assert isinstance(cfg, RLConfig)
    with start_engine(started_with(cfg), str(model), "float32", tmp_path_factory.mktemp("logs")) as made:
        made.wait_ready()
        yield made


def make_sync(engine: Engine, adapters: RandomAdapters, base: Path, lora: LoRA = SPEC) -> AdapterSync:
    cfg = SyncConfig(lora="adapter", verify="checksum", timeout_s=60.0)
    sources = {"": AdapterSource(adapters, lora)}
    return AdapterSync(sources, FileExporter(base), engine.urls, cfg, access=engine.pool.access)


def drawn(engine: Engine) -> list[Sample]:
    prompts = [tuple(10 + (7 * n + k) % 290 for k in range(1 + 3 * n)) for n in range(6)]
    asked = [Request(n, n, Prompt(n, ids, {}), sample_seed(1, 0, n)) for n, ids in enumerate(prompts)]
    return engine.generate(asked, SamplingParams(temperature=1.0, max_new_tokens=24))


@torch.no_grad()
def gap(samples: list[Sample], model: Path, adapters: RandomAdapters | None) -> float:
    """Returns the largest log-prob difference between the engine and transformers with merged adapters."""
    reference: Any = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    for name, a in (adapters.tensors if adapters is not None else {}).items():
        if name.endswith("lora_A.weight"):
            b = adapters.tensors[name.replace("lora_A", "lora_B")]  # type: ignore[union-attr]
            reference.get_parameter(name.replace("lora_A.", "")).add_(SPEC.scale * b @ a)
    found = 0.0
    for sample in samples:
        prompt, response = list(sample.request.prompt.token_ids), torch.from_numpy(sample.response_ids)
        scores = reference(torch.tensor([[*prompt, *response.tolist()]])).logits[0].log_softmax(-1)
        want = scores[len(prompt) - 1 : -1].gather(1, response[:, None])[:, 0]
        found = max(found, float((want - torch.from_numpy(sample.log_probs)).abs().max()))
    return found


def test_the_engine_draws_with_the_adapters_that_were_pushed_last(engine: Engine, model: Path) -> None:
    first, second = RandomAdapters(model, 1), RandomAdapters(model, 2)
    with closing(make_sync(engine, first, model)) as sync:
        report = sync.update_weights("1")
        engine.has_synced("1", report.adapters)
        before = drawn(engine)
        assert gap(before, model, first) < LOG_PROB_TOLERANCE < 0.1 < gap(before, model, None)
        assert report.verified == report.tensors == len(first.tensors)
        assert report.bytes == sum(tensor.nbytes for tensor in first.tensors.values())
        sync._sources = {"": AdapterSource(second, SPEC)}
        engine.has_synced("2", sync.update_weights("2").adapters)
        after = drawn(engine)
    assert gap(after, model, second) < LOG_PROB_TOLERANCE
    assert {sample.weight_version for sample in after} == {"2"}
    greedy = {"max_new_tokens": 1, "temperature": 0}
    asked = {"input_ids": [5], "sampling_params": greedy, "lora_path": report.adapters[""]}
    with pytest.raises(EngineError, match="Failed to implicitly load"):  # the previous adapter is unloaded
        engine.pool.client(engine.urls[0], 60.0).generate(asked)  # type: ignore[arg-type]


def test_an_engine_that_lost_the_adapter_gets_it_again_under_its_name(engine: Engine, model: Path) -> None:
    adapters, url = RandomAdapters(model, 3), engine.urls[0]
    with closing(make_sync(engine, adapters, model)) as sync:
        names = sync.update_weights("7").adapters
        engine.has_synced("7", names)
        engine.pool.client(url, 60.0).unload_adapter(names[""])
        for _ in range(2):  # the second time it has it already
            assert sync.resync(url).adapters == names
        assert gap(drawn(engine), model, adapters) < LOG_PROB_TOLERANCE


def test_a_directory_of_adapters_is_one_that_sglang_loads(engine: Engine, model: Path, tmp_path: Path) -> None:
    every = replace(SPEC, targets=("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "down_proj"))
    adapters, client = RandomAdapters(model, 4, every), engine.pool.client(engine.urls[0], 60.0)
    adapter_files.write_config(tmp_path, "tiny", adapters.arch, "policy", every, "")
    save_file(
        {PREFIX + name: tensor for name, tensor in adapters.tensors.items()},
        tmp_path / adapter_files.WEIGHTS,
    )
    load = Endpoint[tuple[str, ...]]("load_lora_adapter", read_adapters)
    assert "saved" in client._call(load, {"lora_name": "saved", "lora_path": str(tmp_path)})
    engine.pool.adapters, engine.weight_version = {"": "saved"}, None
    assert gap(drawn(engine), model, adapters) < LOG_PROB_TOLERANCE
    client.unload_adapter("saved")


def test_an_engine_beside_other_weights_is_found_out(engine: Engine, model: Path, tiny_models: TinyModels) -> None:
    other = tiny_models("qwen2", tied=True, seed=1)
    with closing(make_sync(engine, RandomAdapters(model, 1), other)) as sync, pytest.raises(SyncMismatch) as caught:
        sync.update_weights("1")
    assert "engine parameters differ from those sent" in str(caught.value)
    assert ".qkv_proj.weight (made of" in str(caught.value)


IN_FLIGHT = (
    *("rollout.max_staleness=1", "rollout.interrupt=at_sync", "rollout.sampling.max_new_tokens=20"),
    "algorithm.rollout_correction={rollout_is: token}",
)


@pytest.mark.parametrize("how", [(), pytest.param(IN_FLIGHT, marks=pytest.mark.slow)], ids=["synchronous", "in flight"])
def test_a_run_on_it_learns_what_its_engine_draws_with(engine: Engine, config: Path, how: tuple[str, ...]) -> None:
    folder = config.parent
    told = [f"rollout.{key}={value}" for key, value in given(engine, folder).items()]
    with Train(folder, config, *told, *how, f"run.name=run_{len(how)}", "run.steps=3") as run:
        assert run.wait(240) == 0, run.terminal
    rows, of = results(folder / f"runs/run_{len(how)}"), "mismatch/age_0" if how else "mismatch/max_abs"
    assert max(row[of] for row in rows.values() if of in row) < LOG_PROB_TOLERANCE
    assert rows[3]["kl/ref"] > 1e-3, "the adapters do nothing: what was compared is the model without them"


def test_joined_layers_are_completed_with_zeros(model: Path) -> None:
    adapters = RandomAdapters(model, 1)
    names = dict(missing_adapters(adapters.arch, SPEC, adapters.tensors))
    layer = {name.removeprefix("model.layers.0.") for name in names if ".layers.0." in name}
    parts = ("self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj")
    assert layer == {f"{part}.lora_{half}.weight" for part in parts for half in "AB"}
    assert not any(tensor.any() for tensor in names.values())


def test_bytes_that_changed_on_their_way_end_the_engine(
    engine: Engine, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Corrupted bytes end the engine. Must be the file's last test, since it ends the server."""
    adapters = RandomAdapters(model, 1)

    def spoilt(tensors: dict[str, Tensor]) -> str:
        first = next(iter(tensors))
        return pickle_by_name(tensors | {first: tensors[first] + 1e-3})

    monkeypatch.setattr("mrl.weights.sync.adapter.pickle_by_name", spoilt)
    with closing(make_sync(engine, adapters, model)) as sync, pytest.raises(SyncError, match="loading the adapter"):
        sync.update_weights("9")
