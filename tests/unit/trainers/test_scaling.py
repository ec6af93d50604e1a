"""The cost of a step for a rank, counted in operations and not by a clock: docs/scaling.md."""

from __future__ import annotations

import json
import random
import sys
import threading
from collections.abc import Iterator
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from mrl import platform

platform.install()

from mrl.algo import aggregate  # noqa: E402
from mrl.config.schema import RLConfig, SyncConfig  # noqa: E402
from mrl.core import Prompt, Request, Rollout  # noqa: E402
from mrl.data import collate, load_tokenizer  # noqa: E402
from mrl.inference.access import OPEN  # noqa: E402
from mrl.inference.client import EngineClient  # noqa: E402
from mrl.inference.engine_pool import EnginePool  # noqa: E402
from mrl.inference.samples import Expected, read_answer  # noqa: E402
from mrl.inference.server import Server  # noqa: E402
from mrl.inference.server_info import ServerInfo  # noqa: E402
from mrl.parallel import messages  # noqa: E402
from mrl.platform import process  # noqa: E402
from mrl.trainers.rl.experience import Passes, make_experience, token_weights  # noqa: E402
from mrl.trainers.rl.policy_update import policy_targets  # noqa: E402
from mrl.weights.sync.weight_sync import WeightSync  # noqa: E402
from tests.helpers.bare_run import bare_run  # noqa: E402

VOCAB, TOKENS = 151_000, 20_000


def response(tokens: int, seed: int) -> dict[str, Any]:
    draw = random.Random(seed)
    ids = [draw.randrange(VOCAB) for _ in range(tokens)]
    values = torch.tensor([-3 * draw.random() ** 4 for _ in ids]).tolist() + [0.0, -1e-30]
    pairs = [[value, token, None] for value, token in zip(values, ids)]
    meta = {"finish_reason": {"type": "stop"}, "prompt_tokens": 2, "weight_version": "7"}
    meta["output_token_logprobs"] = pairs
    return {"text": '"output_ids":[1]', "output_ids": ids, "meta_info": meta}


def requests(count: int) -> list[Request]:
    return [Request(i, 0, Prompt(i, (1, 2), {}), i) for i in range(count)]


# ---- answers


def test_no_object_a_token_is_kept() -> None:
    contents = [json.dumps(response(TOKENS, seed)).encode() for seed in range(2)]
    asked, expected = requests(2), Expected(VOCAB, TOKENS)
    read_answer(asked[0], contents[0], expected)  # does the lazy imports
    before = sys.getallocatedblocks()
    samples = [read_answer(request, content, expected) for request, content in zip(asked, contents)]
    rollout = collate(0, samples)
    assert sys.getallocatedblocks() - before < TOKENS / 20
    assert rollout.num_response_tokens == 2 * TOKENS


def test_texts_of_many_are_those_of_each(tiny_models: Any) -> None:
    tokenizer, draw = load_tokenizer(tiny_models("qwen2")), random.Random(1)
    ids = [[draw.randrange(len(tokenizer.hf)) for _ in range(40)] + [tokenizer.eos_id] for _ in range(8)]
    assert tokenizer.decode_all([torch.tensor(each, dtype=torch.int32).numpy() for each in ids]) == [
        tokenizer.decode(each) for each in ids
    ]
    tokenizer.hf.clean_up_tokenization_spaces = True  # the setting is applied text by text
    assert tokenizer.decode_all(ids) == [tokenizer.decode(each) for each in ids]


# ---- rank 0 to all ranks


@pytest.fixture
def wire(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """Records what rank 0 broadcasts; a receiver gets the items in the same order."""
    sent: list[Any] = []
    monkeypatch.setattr(dist, "broadcast_object_list", lambda box, **where: sent.append(box[0]))
    monkeypatch.setattr(dist, "broadcast", lambda tensor, **where: sent.append(tensor))
    yield sent


def received(sent: list[Any], monkeypatch: pytest.MonkeyPatch) -> Any:
    left = iter(sent)
    monkeypatch.setattr(dist, "broadcast_object_list", lambda box, **where: box.__setitem__(0, next(left)))
    monkeypatch.setattr(dist, "broadcast", lambda tensor, **where: tensor.copy_(next(left)))
    return messages.receive(None)  # type: ignore[arg-type]


def a_rollout(lens: Tensor) -> Rollout:
    generator = torch.Generator().manual_seed(0)
    total = int(lens.sum())
    return Rollout(
        step=3,
        tokens=torch.randint(50, (total + 2 * lens.numel(),), generator=generator),
        seq_lens=lens + 2,
        prompt_lens=torch.full_like(lens, 2),
        group=torch.arange(lens.numel()) // 2,
        scores=torch.rand(lens.numel(), generator=generator),
        rollout_log_probs=-torch.rand(total, generator=generator),
    )


@pytest.mark.parametrize("piece", [1 << 28, 1000])
def test_a_step_s_samples_are_sent_as_they_are_and_once(
    piece: int, wire: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(messages, "PIECE", piece)
    headers = []
    for samples in (4, 400):
        wire.clear()
        rollout = a_rollout(torch.randint(1, 30, (samples,), generator=torch.Generator().manual_seed(1)))
        messages.send((rollout, {"a": 1.0, "empty": torch.zeros(0), "flags": torch.ones(3, dtype=torch.bool)}), None)  # type: ignore[arg-type]
        header, *tensors = wire
        headers.append(len(header[0]))
        own = sum(x.numel() * x.element_size() for x in vars(rollout).values() if isinstance(x, Tensor))
        assert sum(tensor.numel() for tensor in tensors) == own + 3, "bytes: each tensor's, once, for all receivers"
        made, rest = received(list(wire), monkeypatch)
        assert all(torch.equal(vars(made)[k], v) for k, v in vars(rollout).items() if isinstance(v, Tensor))
        assert rest["a"] == 1.0 and rest["flags"].tolist() == [True] * 3 and rest["empty"].numel() == 0
        monkeypatch.setattr(dist, "broadcast_object_list", lambda box, **where: wire.append(box[0]))
        monkeypatch.setattr(dist, "broadcast", lambda tensor, **where: wire.append(tensor))
    assert headers[0] == headers[1], "what is pickled does not grow with the samples"


# ---- an update


def test_an_update_looks_at_its_mini_batch_alone_and_gets_the_numbers_of_the_whole() -> None:
    lens = torch.tensor([3, 1, 5, 2, 4, 9, 2, 2])
    rollout, generator = a_rollout(lens), torch.Generator().manual_seed(2)
    cfg = RLConfig.model_validate({
        "trainer": "rl", "run": {"name": "r"}, "model": {"path": "-"}, "data": {"train": "-"},
        "reward": {"function": "exact_match"}, "algorithm": {"adv_estimator": "grpo", "lam": 1.0},
        "batch": {"prompts_per_step": 4, "samples_per_prompt": 2, "samples_per_minibatch": 4},
    })  # fmt: skip
    log_probs = -torch.rand(int(lens.sum()), generator=generator)
    exp = make_experience(cfg.algorithm, rollout, Passes(log_probs=log_probs), 0.0)
    run = bare_run(cfg, SimpleNamespace(total_over_context=None), None)  # type: ignore[arg-type]
    for sample_ids in run.minibatches(rollout):
        part, chosen = exp.part(sample_ids), torch.tensor(list(sample_ids))
        inside = torch.isin(torch.arange(8), chosen).repeat_interleave(lens)
        assert part.advantages.untyped_storage().data_ptr() == exp.advantages.untyped_storage().data_ptr()
        assert torch.equal(part.rollout.tokens, rollout.pick(chosen).tokens)
        targets = policy_targets(run, part, 1)
        assert all(x.numel() == inside.sum() for x in vars(targets).values() if isinstance(x, Tensor))
        assert targets.old_log_probs is not None and torch.equal(targets.old_log_probs, log_probs[inside])
        for mode in aggregate.MODES.names():
            whole = rollout.flat(aggregate.token_weights(mode, rollout.dense(inside), 9.0))
            assert torch.equal(token_weights(part.rollout, mode, 9.0), whole[inside])


# ---- many ranks, many engines


def test_a_rank_asks_the_store_no_more_in_a_larger_world(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    for size in (4, 400):
        store = dist.HashStore()
        for word in (*(f"rank {number}" for number in range(size)), process._EVERYBODY):
            dist.PrefixStore(process._attempt(), store).set(word, "here")
        calls: list[str] = []

        class Counting(dist.PrefixStore):
            def check(self, words: list[str]) -> bool:
                calls.append(words[0])  # noqa: B023
                return super().check(words)

        monkeypatch.setattr(process, "_listening_store", lambda *args: store)  # noqa: B023
        monkeypatch.setattr(dist, "PrefixStore", Counting)
        process._meet(1, size, timedelta(seconds=5))
        monkeypatch.undo()
        asked.append(len(calls))
    assert asked == [1, 1]


def test_engines_are_checked_and_opened_at_the_same_time(monkeypatch: pytest.MonkeyPatch) -> None:
    urls = [f"http://127.0.0.{number}:1" for number in range(1, 5)]
    together = threading.Barrier(len(urls), timeout=60)

    def check(url: str) -> tuple[ServerInfo, list[str]]:
        together.wait()
        return ServerInfo("cpu", True, True), [f"note of {url}"]

    settings = {"startup_timeout_s": 1, "max_restarts": 0, "memory_timeout_s": 1}
    pool = EnginePool([Server(url) for url in urls], OPEN, check, **settings)  # type: ignore[arg-type]
    pool.wait_ready()
    assert pool.notes == [f"note of {url}" for url in urls], "in the servers' order"

    monkeypatch.setattr(EngineClient, "begin_weight_update", lambda client: bool(together.wait()) or True)
    for quiet in ("end_weight_update", "flush_when_idle", "update_weight_version"):
        monkeypatch.setattr(EngineClient, quiet, lambda client, *args: None)
    monkeypatch.setattr("mrl.weights.sync.weight_sync.joined_tensors", lambda arch: {})
    exporter: Any = SimpleNamespace(arch=None, metas=list, stream=lambda: iter(()))
    sync = WeightSync(exporter, urls, SyncConfig(transport="http"))
    sync.update_weights("1")
    assert sync._open_sessions == []
    sync.close()
