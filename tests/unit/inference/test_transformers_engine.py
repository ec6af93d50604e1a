"""The transformers engine in this process: it samples as requested, from unmodified logits."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from mrl.core import SamplingParams
from mrl.inference.samples import sampling_body
from mrl.inference.serving import BadRequest
from mrl.inference.transformers_engine.sampling import Job, parse_job
from mrl.inference.transformers_engine.server import Endpoints
from mrl.inference.transformers_engine.worker import Worker, _Generation
from tests.conftest import TinyModels
from tests.helpers.tiny import DELTA_FAMILIES, FAMILIES

PROMPT = [5, 6, 7, 8, 5, 6]
ASKED = {"temperature": 1.0, "max_new_tokens": 20, "sampling_seed": 3}


@pytest.fixture
def model(tiny_models: TinyModels, tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny_models("qwen2"), tmp_path / "model"))


def draw(worker: Worker, **asked: Any) -> tuple[list[int], list[float]]:
    job = parse_job(PROMPT, ASKED | asked, worker.eos_ids, 128)
    return worker.generate(job), job.log_probs


@pytest.mark.parametrize("own", [{"repetition_penalty": 1.3}, {"suppress_tokens": [2, 3]}, {"num_beams": 2}])
def test_what_a_model_says_of_generation_changes_neither_tokens_nor_log_probs(model: Path, own: dict[str, Any]) -> None:
    plain = draw(Worker(str(model), torch.float32, "cpu", 8))
    file = model / "generation_config.json"
    known = json.loads(file.read_text()) if file.exists() else {}
    file.write_text(json.dumps(known | own))
    worker = Worker(str(model), torch.float32, "cpu", 8)
    tokens, log_probs = draw(worker)
    assert (tokens, log_probs) == plain and len(tokens) > 1
    logits = worker.model(torch.tensor([PROMPT + tokens])).logits[0, len(PROMPT) - 1 : -1].float()
    expected = logits.log_softmax(-1).gather(1, torch.tensor(tokens)[:, None])[:, 0]
    assert torch.allclose(torch.tensor(log_probs), expected, atol=1e-4)


def test_parameters_that_it_does_not_know_are_refused_unless_they_change_nothing() -> None:
    parse_job(PROMPT, {**sampling_body(SamplingParams(), 3)}, (), 512)
    wrong = {**sampling_body(SamplingParams(), 3), "min_p": 0.1, "n": 2, "repetition_penalty": 1.0, "beam_width": 3}
    with pytest.raises(ValueError, match="unsupported sampling_params: beam_width, min_p, n$"):
        parse_job(PROMPT, wrong, (), 512)


def test_an_adapter_that_it_does_not_have_is_refused() -> None:
    """The base model would answer in its place."""
    worker: Any = SimpleNamespace(routed=None)
    body = {"input_ids": PROMPT, "sampling_params": sampling_body(SamplingParams(), 3), "lora_path": "mrl-1"}
    with pytest.raises(BadRequest, match="lora_path: this engine has no adapters, and was asked for 'mrl-1'"):
        Endpoints(worker, 128).generate(body)


@pytest.mark.parametrize("start", [-1, 4, 1.0, "2", True])
def test_a_beginning_that_the_prompt_does_not_have_is_the_caller_s_mistake(start: Any) -> None:
    worker: Any = SimpleNamespace(routed=object())
    body = {"input_ids": [1, 2, 3], "return_routed_experts": True, "routed_experts_start_len": start}
    with pytest.raises(BadRequest, match=f"routed_experts_start_len: {start!r} is not a number of tokens that the"):
        Endpoints(worker, 128).generate(body)


def test_stop_strings_are_read_after_a_push_from_a_directory_without_a_tokenizer(model: Path, tmp_path: Path) -> None:
    worker = Worker(str(model), torch.float32, "cpu", 8)
    before = draw(worker)[0]
    pushed = tmp_path / "pushed"
    pushed.mkdir()
    state = {name: tensor.contiguous().clone() for name, tensor in worker.model.state_dict().items()}
    if worker.model.config.tie_word_embeddings:
        del state["lm_head.weight"]
    save_file(state, pushed / "model.safetensors")
    worker.update_from_disk(str(pushed), "1")
    shutil.rmtree(pushed)
    assert draw(worker, stop=["never drawn"])[0] == before


FAST = ("llama", "gemma3_text", "deepseek_v3", "gpt_oss")
ENDS = [3, 30, 2, 1, 21, 5, 20, 4]  # the response ends after this number of tokens


def of_many_lengths(worker: Worker) -> list[Job]:
    drawn = random.Random(0)
    prompts = [drawn.choices(range(3, 300), k=5 + 3 * number) for number in range(len(ENDS))]
    asked = {"temperature": 1.0, "ignore_eos": True}
    return [
        parse_job(prompt, asked | {"max_new_tokens": end, "sampling_seed": number}, worker.eos_ids, 128)
        for number, (prompt, end) in enumerate(zip(prompts, ENDS))
    ]


@pytest.mark.parametrize(
    "family", [family if family in FAST else pytest.param(family, marks=pytest.mark.slow) for family in FAMILIES]
)
def test_rows_that_have_ended_leave_the_others(family: str, tiny_models: TinyModels) -> None:
    """Finished rows leave the batch, and the others generate as they do alone, from the remaining rows' cache, also
    with sliding windows, latent vectors and experts."""
    worker = Worker(str(tiny_models(family)), torch.float32, "cpu", 8)
    alone, together = of_many_lengths(worker), of_many_lengths(worker)
    wanted = [worker.generate(job) for job in alone]
    rows: list[int] = []
    worker.model.register_forward_pre_hook(
        lambda _, args, kwargs: rows.append(len(kwargs["input_ids"])), with_kwargs=True
    )
    found = list(worker._responses(together))
    assert [ENDS[place] for place, _ in found[:3]] == [3, 2, 1] and found[-1][0] == ENDS.index(30)
    assert [tokens for _, tokens in sorted(found)] == wanted and [len(tokens) for tokens in wanted] == ENDS
    for job, other in zip(together, alone, strict=True):
        assert job.log_probs == pytest.approx(other.log_probs, abs=1e-4) and job.finish == other.finish
    assert rows == [8] * 3 + [5] * 2 + [3] * 15 + [2] + [1] * 9


@pytest.mark.parametrize(
    "family",
    [
        family if family in FAST else pytest.param(family, marks=pytest.mark.slow)
        for family in FAMILIES
        if family not in DELTA_FAMILIES  # their convolution and delta rule in transformers depend on the batch
    ],
)
def test_bits_do_not_depend_on_the_batch(family: str, tiny_models: TinyModels) -> None:
    """Tokens and log-probs are bitwise equal for requests alone, in pairs, and all together with padding."""
    worker = Worker(str(tiny_models(family)), torch.float32, "cpu", 8)

    def drawn(size: int) -> list[tuple[list[int], list[float]]]:
        jobs = of_many_lengths(worker)
        found: list[tuple[list[int], list[float]]] = []
        for start in range(0, len(jobs), size):
            part = jobs[start : start + size]
            tokens = dict(worker._responses(part))
            found += [(tokens[place], job.log_probs) for place, job in enumerate(part)]
        return found

    alone = drawn(1)
    for size in (2, 3, len(ENDS)):
        assert drawn(size) == alone, size


def test_an_error_is_of_those_that_were_not_done(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    worker = Worker(str(model), torch.float32, "cpu", 8)
    waiting = [_Generation(job, Future()) for job in of_many_lengths(worker)[:3]]

    def responses(jobs: list[Job]) -> Iterator[tuple[int, list[int]]]:
        yield 1, [7]
        raise RuntimeError("out of memory")

    monkeypatch.setattr(worker, "_responses", responses)
    worker._run(waiting)
    assert waiting[1].done.result() == [7]
    assert all(str(waiting[place].done.exception()) == "out of memory" for place in (0, 2))
