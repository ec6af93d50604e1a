"""Seeds, the sampler's arithmetic, the shim's kernels and the payload reader, without a server."""

from __future__ import annotations

import base64
import json
import os
import pickle
import signal
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from mrl.config.derived import Machine
from mrl.config.schema import RolloutConfig, SamplingConfig
from mrl.core import Prompt, Request, SamplingParams
from mrl.families import load_arch
from mrl.families.engine_cache import CPU_BYTES, cache_bytes_a_token
from mrl.inference.launch import CPU, Launch, ServerSpec
from mrl.inference.samples import prefill_body
from mrl.inference.seeds import _splitmix64, sample_seed
from mrl.inference.sglang.command import CONTEXT_KEPT, SHIM, sglang_launch
from mrl.inference.sglang.cpu_shim.mrl_cpu_engine import adaptations, batched_attention, layers, pictures
from mrl.inference.sglang.cpu_shim.mrl_cpu_engine.batch_invariance import BatchInvariance
from mrl.inference.sglang.cpu_shim.mrl_cpu_engine.draws import draw
from mrl.inference.sglang.cpu_shim.mrl_cpu_engine.kernels import assign_req_to_token_pool_cpu, murmur_hash32_cpu
from mrl.inference.sglang.cpu_shim.mrl_cpu_engine.model import served
from mrl.inference.transformers_engine.command import transformers_launch
from mrl.inference.transformers_engine.sampling import keep_top, parse_job
from mrl.inference.transformers_engine.weights import read_payload
from tests.conftest import TinyModels


def test_seeds_are_distinct_reproducible_and_in_range() -> None:
    triples = [(r, s, i) for r in range(4) for s in range(64) for i in range(256)]
    seeds = [sample_seed(*t) for t in triples]
    assert len(set(seeds)) == len(seeds)
    assert all(0 <= s < 1 << 63 for s in seeds)
    assert _splitmix64(0) == 0xE220A8397B1DCDAF, "the published generator's first output for seed 0"
    assert sample_seed(1, 2, 3) == 7510213797696614745, "a change here changes what a resumed run samples"
    bits = torch.tensor([[(s >> b) & 1 for b in range(63)] for s in seeds[:4096]]).double()
    assert bool(((bits.mean(0) - 0.5).abs() < 0.05).all()), "every bit of the seed varies"
    with pytest.raises(ValueError, match="negative"):
        sample_seed(1, -1, 0)


def murmur3(data: bytes) -> int:
    """Returns MurmurHash3_x86_32 with seed 0 by its definition; len(data) is a multiple of 4."""
    m, h = 0xFFFFFFFF, 0
    for i in range(0, len(data), 4):
        k = int.from_bytes(data[i : i + 4], "little") * 0xCC9E2D51 & m
        k = ((k << 15 | k >> 17) & m) * 0x1B873593 & m
        h ^= k
        h = (h << 13 | h >> 19) & m
        h = (h * 5 + 0xE6546B64) & m
    h ^= len(data)
    h = (h ^ h >> 16) * 0x85EBCA6B & m
    h = (h ^ h >> 13) * 0xC2B2AE35 & m
    return h ^ h >> 16


def test_the_hash_is_murmur3() -> None:
    seeds, positions = [0, 1, (1 << 63) - 1, 0x123456789ABCDEF0], [0, 7, 511, 4]
    got = murmur_hash32_cpu(torch.tensor(seeds).to(torch.uint64), torch.tensor(positions), torch.arange(300))
    for row, (seed, position) in enumerate(zip(seeds, positions)):
        for column in (0, 1, 255, 299):
            data = seed.to_bytes(8, "little") + position.to_bytes(4, "little") + column.to_bytes(4, "little")
            assert int(got[row, column]) == murmur3(data)


def plain_draw(log_probs: torch.Tensor, seeds: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Draws as sglang's multinomial_with_seed does, with noise for every token in float64."""
    u = murmur_hash32_cpu(seeds, positions, torch.arange(log_probs.shape[1])).double() / ((1 << 32) - 1)
    noise = -(-u.log().clamp(min=torch.finfo(torch.float64).min, max=-(2.0**-32))).log()
    assert float(noise.mean()) == pytest.approx(0.5772, abs=0.05)
    return (noise + log_probs.double()).argmax(1)


@pytest.mark.parametrize("spread", [0.0, 1.0, 5.0, 100.0])
@pytest.mark.parametrize("vocab", [50, 3000, 70_000])
def test_draws_are_those_of_noise_on_every_token(vocab: int, spread: float) -> None:
    """Draws equal those with noise for every token: flat and peaked rows, excluded tokens, ties and NaN."""
    torch.manual_seed(0)
    rows = 10_000 // vocab + 20
    log_probs = (spread * torch.randn(rows, vocab)).log_softmax(1)
    log_probs[1, 5:] = -torch.inf
    log_probs[2] = torch.nan
    log_probs[3, :10] = log_probs[3, 0]
    seeds, positions = torch.randint(1 << 62, (rows,)), torch.arange(rows)
    drawn = draw(log_probs, seeds, positions)
    assert torch.equal(drawn, plain_draw(log_probs, seeds, positions))
    assert torch.equal(draw(log_probs[7:8], seeds[7:8], positions[7:8]), drawn[7:8]), "other rows took part"


def test_draws_have_the_probabilities() -> None:
    probs = torch.tensor([0.6, 0.3, 0.1, 0.0])
    drawn = draw(probs.log().repeat(20_000, 1), torch.arange(20_000), torch.full((20_000,), 3))
    shares = torch.bincount(drawn, minlength=4) / 20_000
    torch.testing.assert_close(shares, probs, rtol=0, atol=0.015)


def test_keep_top() -> None:
    log_probs = torch.tensor([[0.1, 0.4, 0.2, 0.3]]).log().repeat(4, 1)
    kept = keep_top(log_probs, torch.tensor([-1, 2, -1, 1]), torch.tensor([1.0, 1.0, 0.6, 0.9])).isfinite()
    assert kept.tolist() == [
        [True, True, True, True],
        [False, True, False, True],
        [False, True, False, True],
        [False, True, False, False],
    ]


def test_the_transformers_engine_ignores_no_parameter_in_silence() -> None:
    with pytest.raises(ValueError, match="min_p"):
        parse_job([1], {"min_p": 0.1}, (), 64)
    with pytest.raises(ValueError, match="60 tokens of prompt and max_new_tokens = 5 exceed the context of 64"):
        parse_job([1] * 60, {"max_new_tokens": 5}, (), 64)
    for wrong in (0, -1, None, 2.5):
        with pytest.raises(ValueError, match="max_new_tokens: .* is not a number of tokens from 1 on"):
            parse_job([1], {"max_new_tokens": wrong}, (), 64)


def test_cache_slots_are_written_where_they_belong() -> None:
    table = torch.full((4, 8), -1, dtype=torch.int32)
    assign_req_to_token_pool_cpu(
        torch.tensor([2, 0]), table, torch.tensor([1, 0]), torch.tensor([4, 2]), torch.tensor([10, 11, 12, 20, 21]), 8
    )
    assert table[2].tolist() == [-1, 10, 11, 12, -1, -1, -1, -1]
    assert table[0].tolist() == [20, 21, -1, -1, -1, -1, -1, -1]
    assert bool((table[[1, 3]] == -1).all())


@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("limit", [1 << 26, 1], ids=["one_call", "cut_into_groups"])
def test_batched_attention_equals_one_request_at_a_time(
    window: int | None, limit: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batched_attention, "MAX_SCORES", limit)
    torch.manual_seed(0)
    heads, kv_heads, dim = 4, 2, 8
    k_cache, v_cache = torch.randn(2, 100, kv_heads, dim)
    k_cache[0] = v_cache[0] = 1e4  # slot 0 is padding, which must never be read
    table = torch.randperm(99)[:66].view(3, 22).int() + 1
    prefix, new = torch.tensor([0, 5, 3]), torch.tensor([7, 2, 9])
    lens = prefix + new

    def reference(query: torch.Tensor, row: int, length: int) -> torch.Tensor:
        """Returns the attention of query [q, heads, dim], the last q tokens of the first `length`."""
        slots = table[row, :length].long()
        k, v = (c[slots].transpose(0, 1).repeat_interleave(heads // kv_heads, 0) for c in (k_cache, v_cache))
        at, key = torch.arange(length - len(query), length)[:, None], torch.arange(length)[None]
        mask = (key <= at) if window is None else (key <= at) & (key >= at - window)
        return scaled_dot_product_attention(query.transpose(0, 1), k, v, attn_mask=mask, scale=0.3).transpose(0, 1)

    query = torch.randn(int(new.sum()), heads, dim)
    out = torch.zeros_like(query)
    for group in batched_attention.plan_extend(table, lens, prefix, new, window, heads):
        batched_attention._attend_extend(group, query, out, k_cache, v_cache, 0.3)
    expected = [reference(q, row, int(lens[row])) for row, q in enumerate(query.split(new.tolist()))]
    torch.testing.assert_close(out, torch.cat(expected), atol=1e-5, rtol=1e-5)

    query = torch.randn(3, heads, dim)
    out = torch.zeros_like(query)
    for group in batched_attention.plan_decode(table, lens, window, heads):
        batched_attention._attend_decode(group, query, out, k_cache, v_cache, 0.3)
    expected = [reference(query[row : row + 1], row, int(lens[row])) for row in range(3)]
    torch.testing.assert_close(out, torch.cat(expected), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("width", [32, 24], ids=["in_place", "gathered"])
@pytest.mark.parametrize("window", [None, 3])
def test_a_token_s_attention_has_the_same_bits_in_any_batch(window: int | None, width: int) -> None:
    """A token's attention is bitwise equal in every batch, for keys and values and for latent vectors."""
    torch.manual_seed(0)
    k_cache = torch.randn(100, 2, width)
    v_cache = torch.randn(100, 2, width) if width == 32 else k_cache[..., :16]
    table = torch.randperm(99)[:66].view(3, 22).int() + 1
    prefix, new = torch.tensor([0, 5, 3]), torch.tensor([7, 2, 9])

    def attention(query: torch.Tensor, chosen: torch.Tensor, is_extend: bool = True) -> torch.Tensor:
        given = {
            "query": query, "output": torch.empty(*query.shape[:2], v_cache.size(-1)), "k_cache": k_cache,
            "v_cache": v_cache, "req_to_token": table, "req_pool_indices": chosen, "scaling": 0.3,
            "seq_lens": (prefix + new)[chosen], "extend_prefix_lens": prefix[chosen],
            "extend_seq_lens": new[chosen], "sliding_window_size": window,
        }  # fmt: skip
        return batched_attention._attend_by_token(given, *batched_attention.new_tokens(given, is_extend))

    query = torch.randn(int(new.sum()), 4, width)
    found = attention(query, torch.arange(3)).split(new.tolist())
    last = torch.stack([part[-1] for part in query.split(new.tolist())])
    decoded = attention(last, torch.arange(3), is_extend=False)
    for row, own in enumerate(query.split(new.tolist())):
        assert torch.equal(attention(own, torch.tensor([row])), found[row])
        assert torch.equal(decoded[row], found[row][-1]), "a token's attention differs between prefill and decode"
        slots, length = table[row, : prefix[row] + new[row]].long(), int(prefix[row] + new[row])
        key, value = (cache[slots].transpose(0, 1).repeat_interleave(2, 0) for cache in (k_cache, v_cache))
        at, place = torch.arange(length - len(own), length)[:, None], torch.arange(length)
        mask = (place <= at) if window is None else (place <= at) & (place >= at - window)
        wanted = scaled_dot_product_attention(own.transpose(0, 1), key, value, attn_mask=mask, scale=0.3)
        torch.testing.assert_close(found[row], wanted.transpose(0, 1), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("beta", [0, 1])
@pytest.mark.parametrize("shape", [(64, 1), (64, 320), (20, 33), (3, 48)])
def test_rows_of_products_and_functions_have_the_same_bits_however_many_there_are(
    shape: tuple[int, int], beta: int
) -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(40, shape[0]), torch.randn(shape[1], shape[0])

    def results(x: torch.Tensor) -> list[torch.Tensor]:
        linear = torch.nn.functional.linear(x, weight)
        batched = torch.bmm(x.expand(2, -1, -1), weight.T.expand(2, -1, -1))[0]
        added = torch.ones(2, len(x), 2 * shape[1])[1, :, shape[1] :].addmm_(x, weight.T, beta=beta, alpha=0.7)
        products = [linear, x @ weight.T, torch.mm(x, weight.T), batched, added]
        return [*products, linear.sigmoid(), torch.nn.functional.silu(x)]

    with BatchInvariance():
        whole = results(x)
        for rows in range(1, len(x)):
            assert all(torch.equal(a, b[:rows]) for a, b in zip(results(x[:rows]), whole)), rows
    torch.testing.assert_close(whole, results(x), atol=1e-4, rtol=1e-4)


class StockRotary:
    """Rotates the first `rotary` channels of each head as sglang's RotaryEmbedding does."""

    def __init__(self, rotary: int, is_neox_style: bool = True) -> None:
        self.head_size, self.is_neox_style = 8, is_neox_style
        angles = torch.arange(64)[:, None] / 100.0 ** (torch.arange(rotary // 2) * 2 / rotary)
        self.cos_sin_cache = torch.cat([angles.cos(), angles.sin()], -1)

    def forward_native(self, positions: torch.Tensor, query: torch.Tensor, key: torch.Tensor) -> Any:
        return self.turned(positions, query), self.turned(positions, key)

    def turned(self, positions: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        heads = x.view(len(positions), -1, self.head_size).clone()
        cos, sin = self.cos_sin_cache[positions][:, None].to(x.dtype).chunk(2, -1)
        rotary = 2 * cos.size(-1)
        one, other = (slice(0, rotary // 2), slice(rotary // 2, rotary))
        if not self.is_neox_style:
            one, other = slice(0, rotary, 2), slice(1, rotary, 2)
        a, b = heads[..., one].clone(), heads[..., other].clone()
        heads[..., one], heads[..., other] = a * cos - b * sin, b * cos + a * sin
        return heads.view(x.shape)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("rotary, neox", [(8, True), (4, True), (4, False)], ids=["whole", "part", "interleaved"])
def test_rotations_in_whole_rows_are_the_stock_ones(rotary: int, neox: bool, dtype: torch.dtype) -> None:
    """Rotations of whole rows equal the stock ones, also if positions change in place or in number."""
    module = SimpleNamespace(RotaryEmbedding=type("Rotary", (StockRotary,), {}))
    layers.rotations_in_whole_rows(module)
    layer = module.RotaryEmbedding(rotary, neox)
    positions = torch.tensor([3, 0, 41, 7])
    for tokens in (4, 4, 2):
        qkv = torch.randn(tokens, 5 * 8, dtype=dtype)
        before, (query, key, _) = qkv.clone(), qkv.split([3 * 8, 8, 8], -1)
        rotated = layer.forward_native(positions[:tokens], query, key)
        assert all(x.is_contiguous() for x in rotated) or not neox
        bound = 1e-6 if dtype == torch.float32 else 0.02
        expected = StockRotary(rotary, neox).forward_native(positions[:tokens], query.float(), key.float())
        torch.testing.assert_close([x.float() for x in rotated], list(expected), atol=bound, rtol=bound)
        assert torch.equal(qkv, before), "the projection's output is the caller's"
        positions += 1


def encode(value: Any) -> str:
    return base64.b64encode(pickle.dumps(value)).decode()


def test_payloads_rebuild_tensors() -> None:
    tensors = [("a", torch.randn(2, 3)), ("b", torch.arange(4).bfloat16())]
    for (name, tensor), (expected_name, expected) in zip(read_payload(encode(tensors), None), tensors):
        assert name == expected_name and torch.equal(tensor, expected)
    flat = torch.cat([t.flatten().view(torch.uint8) for _, t in tensors])
    meta = [
        SimpleNamespace(name="a", shape=torch.Size([2, 3]), dtype=torch.float32, start_idx=0, end_idx=24),
        SimpleNamespace(name="b", shape=torch.Size([4]), dtype=torch.bfloat16, start_idx=24, end_idx=32),
    ]
    rebuilt = read_payload(encode({"flattened_tensor": flat, "metadata": meta}), "flattened_bucket")
    assert all(torch.equal(t, e) for (_, t), (_, e) in zip(rebuilt, tensors))


class Evil:
    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return os.system, ("touch /tmp/should_not_exist",)


class EvilTensor:
    """Bypasses a check of names alone: it calls torch's own loader with a malicious pickle."""

    def __reduce__(self) -> tuple[Any, tuple[bytes]]:
        return torch.storage._load_from_bytes, (pickle.dumps(Evil()),)


@pytest.mark.parametrize("value", [Evil(), EvilTensor()], ids=["direct", "nested"])
def test_payloads_cannot_run_code(value: Any) -> None:
    with pytest.raises(pickle.UnpicklingError):
        read_payload(encode([("a", value)]), None)


def launch(*spec: Any, **more: Any) -> Launch:
    return sglang_launch(ServerSpec(*spec, **more))


def test_the_command_line_of_a_server(tiny_models: TinyModels, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("MASTER_PORT", "29500")
    path = str(tiny_models("llama"))
    start = partial(launch, folder=tmp_path)
    cfg = RolloutConfig(server_args=("--foo", "1"))
    cpu = start(cfg, path, "float32", 8000, 0, 5, machine=CPU, api_key="sesame")
    assert cpu.command[-2:] == ["--foo", "1"]
    assert "sesame" not in str(cpu) and cpu.command[-4:-2] == ["--config", str(tmp_path / "key.yaml")]
    assert (tmp_path / "key.yaml").read_text() == 'api-key: "sesame"\n'
    assert (tmp_path / "key.yaml").stat().st_mode & 0o777 == 0o600
    assert cpu.env["SGLANG_ENABLE_TORCH_INFERENCE_MODE"] == cpu.env["SGLANG_EAGER_INPUT_NO_COPY"] == "true"
    assert "--skip-tokenizer-init" in cpu.command and "--enable-deterministic-inference" in cpu.command
    assert cpu.env["PYTHONPATH"].split(os.pathsep)[0] == str(SHIM)
    assert "RANK" not in cpu.env and "MASTER_PORT" not in cpu.env
    sampling = SamplingConfig(stop=("x",))
    cfg = RolloutConfig(servers=2, tensor=2, memory_fraction=0.5, deterministic=False, sampling=sampling)
    gpu = start(cfg, path, "bfloat16", 8000, 1, 5, machine=Machine(2, 2, 4))
    flags = dict(zip(gpu.command, gpu.command[1:]))
    assert (flags["--mem-fraction-static"], flags["--tp-size"]) == ("0.5", "2")
    assert gpu.env["CUDA_VISIBLE_DEVICES"] == "2,3,0,1" and "CUDA_VISIBLE_DEVICES" not in cpu.env
    assert flags["--random-seed"] == "6" and str(SHIM) not in gpu.env.get("PYTHONPATH", "")
    assert not {"--skip-tokenizer-init", "--enable-deterministic-inference", "--device", "--load-format"} & set(
        gpu.command
    )
    shared = start(
        RolloutConfig(), str(tiny_models("glm4_moe", weights=False)), "bfloat16", 1, 0, 0, machine=Machine(1, 1, 1)
    )
    assert "--disable-shared-experts-fusion" in shared.command and "--disable-shared-experts-fusion" not in gpu.command
    scratch = start(RolloutConfig(), str(tiny_models("llama", weights=False)), "float32", 1, 0, 0, machine=CPU)
    assert dict(zip(scratch.command, scratch.command[1:]))["--load-format"] == "dummy"


def test_a_prompt_that_several_requests_share_is_asked_for_first() -> None:
    long, short = (Prompt(i, tuple(range(n)), {}) for i, n in enumerate((40, 8)))
    params = SamplingParams(temperature=0.7, max_new_tokens=9)

    def asked(*prompts: Prompt) -> list[int]:
        body = prefill_body([Request(i, i, prompt, i) for i, prompt in enumerate(prompts)], params, "adapter")
        if body is None:
            return []
        assert body["sampling_params"]["max_new_tokens"] == 0 and body["lora_path"] == "adapter"
        return body["input_ids"]

    assert asked(long, long) == list(range(40))
    assert asked(long) == asked(short, short) == asked(*[replace(long, pictures=(b"",))] * 2) == []


def test_engines_of_a_model_that_is_not_tiny_share_the_cores_that_ranks_leave(
    tiny_models: TinyModels, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    tiny, real = tiny_models("llama"), tiny_models("llama", weights=False, vocab_size=400_000)

    def threads(model: Path, ranks: int = 1, **keys: Any) -> str:
        cfg = RolloutConfig(**keys)
        start = sglang_launch if cfg.engine == "sglang" else transformers_launch
        machine = Machine(ranks, ranks, gpus=0)
        return start(ServerSpec(cfg, str(model), "float32", 1, 0, 0, machine, tmp_path)).env["OMP_NUM_THREADS"]

    for engine in ("sglang", "transformers"):
        assert threads(tiny, engine=engine) == "1"
        assert threads(tiny, engine=engine, threads=3) == "3"
        assert threads(real, engine=engine) == "8"
        assert threads(real, 4, engine=engine, servers=2) == "4"  # the ranks wait meanwhile
        assert threads(real, 4, engine=engine, max_staleness=1) == "4"
        assert threads(real, 8, engine=engine, max_staleness=1) == "1"
    assert threads(real, tensor=2) == "1"


def test_a_server_on_cpus_reserves_cache_for_the_requests_of_a_run(tiny_models: TinyModels, tmp_path: Path) -> None:
    model = tiny_models("llama", max_position_embeddings=8192)
    start = partial(launch, folder=tmp_path)

    def flags(cfg: RolloutConfig) -> tuple[int, int]:
        command = start(cfg, str(model), "float32", 8000, 0, 5, machine=CPU).command
        found = dict(zip(command, command[1:]))
        return int(found["--max-running-requests"]), int(found["--max-total-tokens"])

    short = RolloutConfig(servers=2, concurrent_requests=64, max_context_tokens=90)
    assert flags(short) == (32, 32 * (90 + CONTEXT_KEPT))
    bytes_a_token = cache_bytes_a_token(load_arch(model), 1, 4)
    running, tokens = flags(RolloutConfig(concurrent_requests=512, max_context_tokens=8192))
    assert tokens == running * (8192 + CONTEXT_KEPT) and tokens * bytes_a_token <= CPU_BYTES, "never retracted"


def test_only_the_model_that_is_served_is_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    models = tmp_path / "made_up_models"
    models.mkdir()
    (models / "wanted.py").write_text("class A(object): ...\nclass ALarge(A): ...\nEntryClass = [ALarge, A]\n")
    (models / "other.py").write_text("class B(object): ...\nraise SystemExit('imported')\n")
    (models / "__init__.py").touch()
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(served, "MODELS", "made_up_models")

    def found(*names: str) -> list[str]:
        (tmp_path / "config.json").write_text(json.dumps({"architectures": names}))
        return [one.__name__ for one in served.served(["launch", "--model-path", str(tmp_path), "--port", "1"])]

    assert found("A") == ["A"] and found("Unknown") == [] == served.served(["launch"])


def test_the_server_ends_when_it_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    codes: list[int] = []
    monkeypatch.setattr(os, "_exit", codes.append)
    handler = type("SignalHandler", (), {"sigterm_handler": lambda *_: None})
    adaptations.ADAPTATIONS["sglang.srt.managers.tokenizer_manager"](SimpleNamespace(SignalHandler=handler))
    handler().sigterm_handler(signal.SIGTERM, None)  # type: ignore[attr-defined]
    assert codes == [0]


def test_tensors_that_the_engine_s_processes_send_each_other_arrive_as_they_are() -> None:
    sent = [
        torch.randn(4, 6).T, torch.randn(3)[1:], torch.tensor(7), torch.empty(0, 3, dtype=torch.int64),
        torch.randn(5).bfloat16(), torch.randn(2, requires_grad=True), torch.ones(2, dtype=torch.bool),
    ]  # fmt: skip
    got = pickle.loads(pictures.dumps({"tensors": sent, "rest": ("text", 1)}))
    assert got["rest"] == ("text", 1)
    for a, b in zip(sent, got["tensors"], strict=True):
        assert torch.equal(a, b) and a.dtype == b.dtype and a.requires_grad == b.requires_grad
    got["tensors"][0].add_(1)
    assert len(pictures.dumps(sent[0])) < len(pickle.dumps(sent[0]))
