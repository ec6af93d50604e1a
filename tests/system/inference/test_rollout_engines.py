"""Requirements on every engine, checked against transformers on the same weights: real SGLang, and mrl's own."""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import psutil
import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from mrl.config.schema import RolloutConfig, SyncConfig
from mrl.core import Prompt, Request, Sample, SamplingParams
from mrl.inference import request_dispatcher
from mrl.inference.engine import Engine
from mrl.inference.errors import EngineError, RolloutError
from mrl.inference.protocol import RELEASED_PARTS
from mrl.inference.samples import read_answer
from mrl.inference.seeds import sample_seed
from mrl.inference.start import start_engine
from mrl.weights.errors import SyncError
from mrl.weights.sync.weight_sync import WeightSync
from tests.conftest import TinyModels
from tests.helpers.sync_tools import FileExporter
from tests.helpers.tiny import EOS
from tests.helpers.train_tools import given

pytestmark = pytest.mark.long

PROMPTS = [(5, 17, 99, 200, 42), (8, 9), tuple(range(20, 57)), (300,)]
ENGINES = [pytest.param("sglang_engine", marks=pytest.mark.engine, id="sglang"), "transformers_engine"]


@pytest.fixture(scope="module")
def transformers_engine(tiny_models: TinyModels, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    cfg = RolloutConfig(engine="transformers")
    logs = tmp_path_factory.mktemp("transformers_logs")
    with start_engine(cfg, str(tiny_models("llama")), "float32", logs) as engine:
        engine.wait_ready()
        yield engine


@pytest.fixture(params=ENGINES)
def engine(request: pytest.FixtureRequest) -> Engine:
    return request.getfixturevalue(request.param)


@pytest.fixture(scope="module")
def model(tiny_models: TinyModels) -> torch.nn.Module:
    return AutoModelForCausalLM.from_pretrained(tiny_models("llama")).float().eval()


def requests(prompts: Sequence[Sequence[int]], seeds: Sequence[int] | None = None) -> list[Request]:
    seeds = seeds or range(len(prompts))
    return [Request(i, i, Prompt(i, tuple(p), {}), seed) for i, (p, seed) in enumerate(zip(prompts, seeds))]


@torch.inference_mode()
def logits_of(model: torch.nn.Module, sample: Sample) -> Tensor:
    """Returns the logits that each response token was sampled from, [response tokens, vocab]."""
    prompt, response = list(sample.request.prompt.token_ids), sample.response_ids.tolist()
    return model(torch.tensor([prompt + response])).logits[0, len(prompt) - 1 : -1].double()


@torch.inference_mode()
def greedy(model: torch.nn.Module, prompt: Sequence[int], new: int) -> list[int]:
    ids = torch.tensor([list(prompt)])
    return model.generate(ids, max_new_tokens=new, do_sample=False)[0, len(prompt) :].tolist()


def max_log_prob_error(model: torch.nn.Module, samples: Sequence[Sample], temperature: float) -> float:
    worst = 0.0
    for sample in samples:
        expected = (logits_of(model, sample) / temperature).log_softmax(-1)
        chosen = expected.gather(1, torch.tensor(sample.response_ids.tolist())[:, None])[:, 0]
        worst = max(worst, float((chosen - torch.tensor(sample.log_probs).double()).abs().max()))
    return worst


def test_greedy_equals_transformers_generate(engine: Engine, model: torch.nn.Module) -> None:
    samples = engine.generate(requests(PROMPTS), SamplingParams(temperature=0, max_new_tokens=24))
    for sample in samples:
        assert sample.response_ids.tolist() == greedy(model, sample.request.prompt.token_ids, 24)
    assert max_log_prob_error(model, samples, 1.0) <= 1e-4


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("filters", [{}, {"top_k": 5}, {"top_p": 0.8}], ids=["plain", "top_k", "top_p"])
def test_log_probs_are_of_tempered_unfiltered_logits(
    engine: Engine, model: torch.nn.Module, temperature: float, filters: dict[str, float]
) -> None:
    params = SamplingParams(temperature=temperature, max_new_tokens=24, **filters)  # type: ignore[arg-type]
    samples = engine.generate(requests(PROMPTS), params)
    assert all(len(s.log_probs) == len(s.response_ids.tolist()) > 0 for s in samples)
    assert max_log_prob_error(model, samples, temperature) <= 1e-4


@pytest.mark.parametrize(
    "filters",
    [pytest.param({}, marks=pytest.mark.slow, id="plain"), pytest.param({"top_k": 7, "top_p": 0.9}, id="filtered")],
)
def test_a_seed_gives_the_same_tokens_whatever_else_is_in_the_batch(engine: Engine, filters: dict[str, float]) -> None:
    params = SamplingParams(max_new_tokens=32, **filters)  # type: ignore[arg-type]
    seeds = [sample_seed(1, 0, i) for i in range(len(PROMPTS))]
    alone = [engine.generate([request], params)[0].response_ids.tolist() for request in requests(PROMPTS, seeds)]
    assert [s.response_ids.tolist() for s in engine.generate(requests(PROMPTS, seeds), params)] == alone
    crowd = [tuple(range(3 + i, 6 + 2 * i)) for i in range(40)]
    crowd_seeds = [sample_seed(2, 0, i) for i in range(40)]
    mixed = engine.generate(
        requests([*crowd[:20], *PROMPTS, *crowd[20:]], [*crowd_seeds[:20], *seeds, *crowd_seeds[20:]]), params
    )
    assert [s.response_ids.tolist() for s in mixed[20 : 20 + len(PROMPTS)]] == alone


def test_log_probs_have_the_same_bits_in_any_batch(engine: Engine) -> None:
    """Log-probs are bitwise equal for requests sent alone, two at a time and all at once, also with a cached prompt."""
    params = SamplingParams(max_new_tokens=32)
    asked = requests([*PROMPTS, *(tuple(range(3 + i, 6 + 4 * i)) for i in range(8)), *PROMPTS])

    def bits(size: int) -> list[tuple[bytes, bytes]]:
        parts = [engine.generate(asked[start : start + size], params) for start in range(0, len(asked), size)]
        return [(sample.response_ids.tobytes(), sample.log_probs.tobytes()) for part in parts for sample in part]

    alone = bits(1)
    assert bits(2) == alone and bits(len(asked)) == alone


@pytest.mark.engine
def test_samples_of_one_prompt_share_its_keys_and_values(
    sglang_engine: Engine, model: torch.nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    cached = list[int]()

    def read(asked: Request, content: bytes, *more: Any) -> Sample:
        cached.append(json.loads(content)["meta_info"]["cached_tokens"])
        return read_answer(asked, content, *more)

    prompt = Prompt(0, tuple(range(100, 140)), {})
    group = [Request(i, 0, prompt, sample_seed(3, 0, i)) for i in range(6)]
    params = SamplingParams(max_new_tokens=16)
    alone = [sglang_engine.generate([request], params)[0].response_ids.tolist() for request in group]
    with closing(sglang_engine.pool.client(sglang_engine.urls[0])) as client:
        client.flush_cache()
    monkeypatch.setattr(request_dispatcher, "read_answer", read)
    together = sglang_engine.generate(group, params)
    assert cached == [39] * 6  # the last token is computed again for its logits
    assert [sample.response_ids.tolist() for sample in together] == alone
    assert max_log_prob_error(model, together, 1.0) <= 1e-4


def test_distinct_seeds_draw_distinct_samples_of_the_right_distribution(engine: Engine, model: torch.nn.Module) -> None:
    n = 1500
    seeds = [sample_seed(7, 3, i) for i in range(n)]
    samples = engine.generate(requests([PROMPTS[0]] * n, seeds), SamplingParams(max_new_tokens=2))
    assert len({tuple(s.response_ids.tolist()) for s in samples}) > n / 4
    expected = logits_of(model, samples[0])[0].softmax(-1)
    counts = torch.bincount(torch.tensor([s.response_ids.tolist()[0] for s in samples]), minlength=len(expected))
    top = expected.topk(8).indices
    sigma = (n * expected[top] * (1 - expected[top])).sqrt()
    assert bool(((counts[top] - n * expected[top]).abs() < 4.5 * sigma).all())


@pytest.mark.engine
def test_both_engines_draw_the_same_tokens(sglang_engine: Engine, transformers_engine: Engine) -> None:
    params, asked = SamplingParams(temperature=0.9, max_new_tokens=24), requests(PROMPTS, [11, 12, 13, 14])
    a, b = sglang_engine.generate(asked, params), transformers_engine.generate(asked, params)
    assert [s.response_ids.tolist() for s in a] == [s.response_ids.tolist() for s in b]


def test_top_k_and_top_p_keep_to_the_likely_tokens(engine: Engine, model: torch.nn.Module) -> None:
    many = requests([PROMPTS[0]] * 24, [sample_seed(5, 0, i) for i in range(24)])
    for sample in engine.generate(many, SamplingParams(temperature=1.5, top_k=3, max_new_tokens=8)):
        best = logits_of(model, sample).topk(3).indices.tolist()
        assert all(token in row for token, row in zip(sample.response_ids.tolist(), best))
    for sample in engine.generate(many, SamplingParams(temperature=1.5, top_p=0.5, max_new_tokens=8)):
        probs, order = (logits_of(model, sample) / 1.5).softmax(-1).sort(descending=True)
        before = probs.cumsum(-1) - probs
        rank = (order == torch.tensor(sample.response_ids.tolist())[:, None]).int().argmax(-1)
        assert bool((before.gather(1, rank[:, None]) <= 0.5 + 1e-6).all())


def test_length_and_stop_ids(engine: Engine, model: torch.nn.Module) -> None:
    full = engine.generate(requests([PROMPTS[0]]), SamplingParams(temperature=0, max_new_tokens=12))[0]
    assert (len(full.response_ids.tolist()), full.finish_reason) == (12, "length")
    stop = full.response_ids.tolist()[5]
    first = full.response_ids.tolist().index(stop)
    params = SamplingParams(temperature=0, max_new_tokens=12, stop_token_ids=(stop,))
    cut = engine.generate(requests([PROMPTS[0]]), params)[0]
    assert cut.response_ids.tolist() == full.response_ids[: first + 1].tolist(), "the stop token belongs to it"
    assert cut.finish_reason == "stop"
    assert cut.log_probs == pytest.approx(full.log_probs[: first + 1], abs=1e-5)


def test_a_request_beyond_the_context_is_refused_by_name(engine: Engine) -> None:
    asked = requests([PROMPTS[0], tuple(3 + i % 300 for i in range(490)), tuple(3 + i % 300 for i in range(511))])
    with pytest.raises(RolloutError, match=r"failed for sample 1 \(data row 1\): HTTP 400.*context") as caught:
        engine.generate(asked[1:2], SamplingParams(max_new_tokens=100))
    assert "490 tokens" in str(caught.value) and "End of" not in str(caught.value)
    # SGLang 0.5.23 alone refuses prompts over 505 tokens, and ends a response at 510 tokens of both
    for one, most in ((asked[1], 512 - 490), (asked[2], 512 - 511)):
        (exact,) = engine.generate([one], SamplingParams(max_new_tokens=most, stop_token_ids=()))
        assert len(exact.response_ids.tolist()) == most or exact.finish_reason == "stop"


def test_the_end_of_sequence_token_ends_a_response_and_is_kept(engine: Engine) -> None:
    asked = requests([PROMPTS[1]] * 64, [sample_seed(9, 0, i) for i in range(64)])
    samples = engine.generate(asked, SamplingParams(temperature=1.5, max_new_tokens=64))
    ended = [s for s in samples if s.finish_reason == "stop"]
    assert ended
    for sample in samples:
        assert EOS not in sample.response_ids.tolist()[:-1]
        assert (sample.response_ids.tolist()[-1] == EOS) == (sample.finish_reason == "stop")


def test_samples_come_ordered_and_are_reported_as_they_finish(engine: Engine) -> None:
    asked = requests([(3 + i, 4, 5) for i in range(100)])
    seen: list[tuple[int, int]] = []
    samples = engine.generate(
        list(reversed(asked)),
        SamplingParams(max_new_tokens=4),
        lambda finished: seen.extend((s.request.sample_id, threading.get_ident()) for s in finished),
    )
    assert [s.request for s in samples] == asked
    assert sorted(seen) == [(i, threading.get_ident()) for i in range(100)]
    assert {s.weight_version for s in samples} == {engine.pool.client(engine.urls[0]).model_info().weight_version}


def test_weights_from_disk_change_the_tokens_and_the_version(
    engine: Engine, model: torch.nn.Module, tiny_models: TinyModels
) -> None:
    client = engine.pool.client(engine.urls[0], 60)
    params = SamplingParams(temperature=0, max_new_tokens=8)
    before = client.weights_checksum()[0].checksums
    other = tiny_models("llama", seed=1)
    try:
        client.update_weights_from_disk(str(other), weight_version="step-7")
        sample = engine.generate(requests([PROMPTS[0]]), params)[0]
        assert sample.weight_version == "step-7"
        assert sample.response_ids.tolist() == greedy(AutoModelForCausalLM.from_pretrained(other), PROMPTS[0], 8)
        changed = client.weights_checksum()[0].checksums
        assert [name for name in before if before[name] == changed[name]] == []
    finally:
        client.update_weights_from_disk(str(tiny_models("llama")), weight_version="default")
    assert client.weights_checksum()[0].checksums == before


def test_a_refused_update_is_an_error_in_the_engines_words(engine: Engine) -> None:
    client = engine.pool.client(engine.urls[0], 60)
    with pytest.raises(EngineError, match="begin_weight_update") as caught:
        client.update_weights_from_tensor(["gASVAgAAAAAAAABdlC4="], weight_version="x")  # an empty list
    assert (caught.value.status, caught.value.endpoint) == (400, "update_weights_from_tensor")
    with pytest.raises(EngineError, match="no weight-update session"):
        client.end_weight_update()


@pytest.mark.engine
def test_both_engines_report_the_same_checksums(sglang_engine: Engine, transformers_engine: Engine) -> None:
    ours, theirs = (e.pool.client(e.urls[0]).weights_checksum() for e in (transformers_engine, sglang_engine))
    assert ours == theirs


def test_a_url_that_serves_another_model_is_refused(engine: Engine, tiny_models: TinyModels, tmp_path: Path) -> None:
    cfg = RolloutConfig.model_validate(given(engine, tmp_path) | {"urls": engine.urls})
    with start_engine(cfg, str(tiny_models("qwen2")), "float32", tmp_path) as wrong:
        with pytest.raises(EngineError, match="a llama model; the trainer has .* a qwen2 model"):
            wrong.wait_ready()
    with start_engine(cfg, str(tiny_models("llama")), "float32", tmp_path) as right:
        assert len(right.generate(requests(PROMPTS), SamplingParams(max_new_tokens=3))) == len(PROMPTS)
    assert engine.pool.client(engine.urls[0]).model_info().model_type == "llama", "closing must leave given URLs alone"


@pytest.mark.engine
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_an_idle_server_has_one_thread_that_waits_for_gloo(sglang_engine: Engine) -> None:
    """An idle server has only one gloo thread. Each such thread wakes a hundred times per second."""
    port = urlsplit(sglang_engine.urls[0]).port
    (server,) = {
        c.pid for c in psutil.net_connections("tcp") if c.status == psutil.CONN_LISTEN and c.laddr.port == port
    }
    threads = [
        (Path("/proc", str(process.pid), "task", str(thread.id), "comm")).read_text().strip()
        for process in psutil.Process(server).children(recursive=True)
        for thread in process.threads()
    ]
    assert threads.count("gloo_tcp_loop") == 1


@pytest.mark.engine
def test_stop_strings_are_refused_where_the_engine_has_no_tokenizer(sglang_engine: Engine) -> None:
    with pytest.raises(RolloutError, match="stop strings .* need an engine with a tokenizer"):
        sglang_engine.generate(requests(PROMPTS), SamplingParams(stop=("x",)))


def test_stop_strings(transformers_engine: Engine) -> None:
    params = SamplingParams(max_new_tokens=40, top_k=60)
    free = transformers_engine.generate(requests(PROMPTS), params)[0]
    from tests.helpers.tiny import tiny_tokenizer

    decode = tiny_tokenizer().decode
    text = decode(free.response_ids.tolist())
    stop = next(c for c in text[5:] if c.isascii())
    cut = transformers_engine.generate(requests(PROMPTS), SamplingParams(max_new_tokens=40, top_k=60, stop=(stop,)))[0]
    assert cut.finish_reason == "stop"
    assert cut.response_ids.tolist() == free.response_ids.tolist()[: len(cut.response_ids.tolist())]
    assert stop in decode(cut.response_ids.tolist()) and stop not in decode(cut.response_ids.tolist()[:-1])


def test_memory_given_up_around_an_update(engine: Engine, tiny_models: TinyModels) -> None:
    """Releases and resumes memory as a step on one GPU does. A repeated request would end SGLang."""
    asked, sampling, cfg = requests(PROMPTS), SamplingParams(max_new_tokens=6), SyncConfig(timeout_s=60.0)
    before = [sample.response_ids.tolist() for sample in engine.generate(asked, sampling)]
    exporter = FileExporter(tiny_models("llama"))
    with closing(
        WeightSync(exporter, engine.urls, cfg, access=engine.pool.access, plain=True, guard=engine.check_sync)
    ) as sync:
        for mode in ("cache", "all"):
            parts = RELEASED_PARTS[mode]
            engine.release_memory(parts)
            engine.release_memory(parts)
            with pytest.raises(RolloutError, match=f"has given up its {', '.join(parts)}"):
                engine.generate(asked, sampling)
            if mode == "all":
                with pytest.raises(SyncError, match="the memory of its weights is released; restore it before the"):
                    sync.update_weights("default")
                engine.resume_memory(["weights"])
                engine.resume_memory(["weights"])
                assert engine.lacks_weights
            assert sync.update_weights("default", verify=True).verified == len(exporter.tensors)
            engine.has_synced("default")
            engine.resume_memory(parts)
            assert [sample.response_ids.tolist() for sample in engine.generate(asked, sampling)] == before
    engine.weight_version = None  # other tests use this engine too
