"""Answers of engines are checked against the request, and samples too far from the trainer's log-probs are refused."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from typing import Any

import httpx
import pytest
import torch

from mrl.config.schema import MismatchConfig
from mrl.core import Prompt, Request, Rollout, SamplingParams
from mrl.inference.answers import error_message, from_json
from mrl.inference.client import EngineClient
from mrl.inference.errors import BadAnswer, EngineError
from mrl.inference.protocol import SamplingBody
from mrl.inference.samples import Expected, generate_body, read_answer
from mrl.inference.server_info import read_server_info
from mrl.trainers.rl.mismatch import MismatchError, MismatchLimits

ASKED = Request(5, 0, Prompt(9, (1, 2), {}), 3)
EXPECTED = Expected(vocab_size=100, max_new_tokens=3, versions={"7"})
DEEP = "[" * 100_000


def good() -> dict[str, Any]:
    pairs = [[-0.5, 4, None], [1e-7, 99, None]]
    meta = {"finish_reason": {"type": "stop", "matched": 99}, "prompt_tokens": 2, "weight_version": "7"}
    return {"output_ids": [4, 99], "meta_info": meta | {"output_token_logprobs": pairs}}


def changed(path: str, value: Any) -> Any:
    """Returns `good()` with one value replaced, or removed if `value` is None."""
    answer = at = good()
    *above, last = path.split(".")
    for name in above:
        at = at[name]
    if value is None:
        del at[last]
    else:
        at[last] = value
    return answer


LOG_PROBS = "meta_info.output_token_logprobs"
BAD: dict[str, tuple[Any, str]] = {
    "a list": ([[]], "the answer is .*expected an object"),
    "a text": ("hello", "the answer is 'hello', expected an object"),
    "null": (None, "the answer is None"),
    "no meta": (changed("meta_info", None), "meta_info is missing"),
    "meta a list": (changed("meta_info", []), "meta_info is .*expected an object"),
    "no ids": (changed("output_ids", None), "output_ids is missing"),
    "ids a text": (changed("output_ids", "ab"), "output_ids is 'ab', expected a list"),
    "ids texts": (changed("output_ids", ["4", "99"]), "output_ids is .*expected whole numbers"),
    "ids fractions": (changed("output_ids", [4.0, 99.5]), "output_ids is .*expected whole numbers"),
    "ids true": (changed("output_ids", [True, 99]), "output_ids is .*expected whole numbers"),
    "ids below": (changed("output_ids", [-1, 99]), "output_ids has token -1, the vocabulary has 100"),
    "ids above": (changed("output_ids", [4, 100]), "output_ids has token 100, the vocabulary has 100"),
    "too many": (changed("output_ids", [4, 5, 6, 7]), "output_ids has 4 tokens, max_new_tokens is 3"),
    "no log-probs": (changed(LOG_PROBS, None), "2 tokens came with output_token_logprobs of 0 tokens"),
    "log-probs of others": (changed(LOG_PROBS, [[-1.0, 4], [-1.0, 5]]), "2 tokens came with .* or of others"),
    "log-probs flat": (changed(LOG_PROBS, [-1.0, -2.0]), "output_token_logprobs is .*expected a list of"),
    "log-probs short": (changed(LOG_PROBS, [[-1.0], [-2.0]]), "output_token_logprobs is .*expected a list of"),
    "log-probs texts": (changed(LOG_PROBS, [["a", 4], [-1.0, 99]]), "output_token_logprobs has .*expected numbers"),
    "log-probs nan": (changed(LOG_PROBS, [[float("nan"), 4], [-1.0, 99]]), "has nan, expected finite"),
    "log-probs -inf": (changed(LOG_PROBS, [[-1.0, 4], [-float("inf"), 99]]), "has -inf, expected finite"),
    "log-probs huge": (changed(LOG_PROBS, [[-(10**400), 4], [-1.0, 99]]), "expected finite numbers of at most 0"),
    "log-probs above": (changed(LOG_PROBS, [[0.5, 4], [-1.0, 99]]), "has 0.5, expected finite numbers of at most 0"),
    "log-probs of single precision": (changed(LOG_PROBS, [[-1e39, 4], [-1.0, 99]]), r"has -1e\+39, expected finite"),
    "no token": (
        changed("output_ids", []) | {"meta_info": good()["meta_info"] | {"output_token_logprobs": []}},
        "output_ids is empty",
    ),
    "cut off early": (
        changed("meta_info.finish_reason", {"type": "length", "length": 2}),
        "cut off after 2 tokens, max_new_tokens is 3: the engine has no room",
    ),
    "no prompt": (changed("meta_info.prompt_tokens", None), "prompt_tokens is missing"),
    "prompt a fraction": (changed("meta_info.prompt_tokens", 2.0), "prompt_tokens is 2.0, expected a whole number"),
    "prompt cut": (changed("meta_info.prompt_tokens", 1), r"prompt_tokens is 1, 2 were sent: .*--allow-auto-truncate"),
    "no reason": (changed("meta_info.finish_reason", None), "finish_reason is missing"),
    "reason a text": (changed("meta_info.finish_reason", "stop"), "finish_reason is 'stop', expected an object"),
    "reason unknown": (changed("meta_info.finish_reason", {"type": "bored"}), "finish_reason is 'bored', expected one"),
    "reason a list": (changed("meta_info.finish_reason", {"type": []}), "type is .*expected a text"),
    "aborted": (changed("meta_info.finish_reason", {"type": "abort", "message": "no"}), "aborted by the engine: 'no'"),
    "no version": (changed("meta_info.weight_version", None), "weight_version is missing"),
    "other weights": (
        changed("meta_info.weight_version", "8"),
        "weight_version is '8', but the run gave the engine '7'",
    ),
}


def test_a_good_answer_is_a_sample() -> None:
    sample = read_answer(ASKED, json.dumps(good()).encode(), EXPECTED)
    assert (sample.response_ids.tolist(), sample.finish_reason) == ([4, 99], "stop")
    assert sample.log_probs.tolist() == torch.tensor([-0.5, 1e-7]).tolist()


@pytest.mark.parametrize("name", BAD)
def test_a_bad_answer_is_refused_by_sample_and_field(name: str) -> None:
    answer, message = BAD[name]
    with pytest.raises(BadAnswer, match=message) as caught:
        read_answer(ASKED, json.dumps(answer).encode(), EXPECTED)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 400
    assert str(caught.value).startswith("sample 5: ")


def test_an_answer_to_another_request_is_not_taken_for_its_own() -> None:
    """An answer to another request is refused, as from a proxy that mixes answers up."""
    name, other = (generate_body(ASKED, SamplingParams())["rid"] for _ in range(2))
    content = json.dumps(good() | {"meta_info": good()["meta_info"] | {"id": other}}).encode()
    assert read_answer(ASKED, content, EXPECTED, other).request is ASKED
    with pytest.raises(BadAnswer, match=f"sample 5: the answer is to another request .'{other}'"):
        read_answer(ASKED, content, EXPECTED, name)


@pytest.mark.parametrize("content", [b"", b"\xff\xff", DEEP.encode(), b"<html>", b'{"a": ' + b"9" * 5000 + b"}"])
def test_what_is_no_json_is_said_to_be_none(content: bytes) -> None:
    with pytest.raises(BadAnswer, match="the answer is no JSON"):
        from_json(content)


INFO = {"model_path": "m", "model_type": "llama", "weight_version": "0"}
RANK = {"checksums": {"a": "00"}, "parallelism_info": {"tp_rank": 0, "tp_size": 1}}
ENDPOINTS: dict[str, tuple[str, Any, str]] = {
    "info a list": ("model_info", [], "/model_info: HTTP 200: the answer is .*expected an object"),
    "info without": ("model_info", {"model_path": "m"}, "/model_info: .*model_type is missing"),
    "info numbers": ("model_info", INFO | {"model_path": 3}, "/model_info: .*model_path is 3, expected a text"),
    "settings a text": ("server_info", "fast", "/server_info: .*the answer is 'fast', expected an object"),
    "no ranks": ("weights_checksum", {"success": True}, "/weights_checker: .*ranks is missing"),
    "ranks a text": ("weights_checksum", {"ranks": "all"}, "/weights_checker: .*ranks is 'all', expected a list"),
    "rank a number": ("weights_checksum", {"ranks": [3]}, "/weights_checker: .*the answer is 3"),
    "no place": ("weights_checksum", {"ranks": [RANK | {"parallelism_info": []}]}, "/weights_checker: .*expected an"),
    "place a text": ("weights_checksum", {"ranks": [RANK | {"parallelism_info": {"tp_rank": "0"}}]}, "tp_rank is '0'"),
    "hashes numbers": (
        "weights_checksum",
        {"ranks": [RANK | {"checksums": {"a": 3}}]},
        "checksums is .*expected texts",
    ),
    "ranks a text of 2": ("server_info", {"tp_size": "2"}, "/server_info: .*tp_size is '2', expected a whole number"),
    "seeded a text": (
        "server_info",
        {"enable_deterministic_inference": "no"},
        "enable_deterministic_inference is 'no', expected true or false",
    ),
    "preferred a list": ("server_info", {"preferred_sampling_params": [1]}, "preferred_sampling_params is .*an object"),
    "no json": ("model_info", b"{", "/model_info: HTTP 200: the answer is no JSON"),
}


def client_of(reply: httpx.Response) -> EngineClient:
    client = EngineClient("http://far:1")
    client._http = httpx.Client(base_url="http://far:1", transport=httpx.MockTransport(lambda request: reply))
    return client


@pytest.mark.parametrize("content", [b"<html>Sign in</html>", b"{}", b'{"success": "yes"}', b'{"success": null}', b"3"])
def test_weights_have_come_where_the_engine_says_so(content: bytes) -> None:
    kind = "text/html" if content.startswith(b"<") else "application/json"
    client = client_of(httpx.Response(200, headers={"Content-Type": kind}, content=content))
    for push in (
        lambda: client.update_weights_from_tensor(["x"]),
        lambda: client.update_weight_version("3"),
        client.begin_weight_update,
    ):
        with pytest.raises(EngineError, match="HTTP 200: the answer is "):
            push()


@pytest.mark.parametrize("name", ENDPOINTS)
def test_an_engine_s_word_about_itself_is_not_believed(name: str) -> None:
    method, answer, message = ENDPOINTS[name]
    content = answer if isinstance(answer, bytes) else json.dumps(answer).encode()
    reply = httpx.Response(200, headers={"Content-Type": "application/json"}, content=content)
    client = client_of(reply)
    with pytest.raises(EngineError, match=message) as caught:
        getattr(client, method)()
    assert str(caught.value).startswith("engine http://far:1: ")


UNFIT: dict[str, tuple[dict[str, Any], str]] = {
    "stages": ({"pp_size": 2}, "cut into 2 stages .--pp-size.*--tp-size"),
    "copies": ({"dp_size": 4}, "has 4 copies of the model .--dp-size.*start as many servers"),
    "rounded": ({"quantization": "fp8"}, "rounds its weights to fp8"),
    "rounded by torchao": ({"torchao_config": "int8wo"}, "rounds its weights to int8wo"),
    "a watermark": (
        {"preferred_sampling_params": {"watermark": {}, "logit_bias": {"3": 9.0}, "top_p": 0.5}},
        "draws by its own logit_bias, watermark .--preferred-sampling-params",
    ),
    "of an older server": ({"preferred_sampling_params": '{"regex": "a*"}'}, "draws by its own regex"),
    "guesses": (
        {"speculative_algorithm": "EAGLE", "speculative_accept_threshold_single": 0.8},
        "takes guesses .EAGLE. that the model would not draw",
    ),
    "other ranks": ({"tp_size": 4}, "has 4 tensor-parallel ranks and was to have rollout.tensor = 2"),
}
FIT = {
    "tp_size": 2,
    "pp_size": 1,
    "dp_size": 1,
    "quantization": None,
    "torchao_config": "",
    "preferred_sampling_params": {"top_p": 0.5, "repetition_penalty": 1.1},
    "speculative_algorithm": "EAGLE",
    "speculative_accept_threshold_single": 1.0,
    "speculative_accept_threshold_acc": 1.0,
    "max_req_input_len": 122,
}


@pytest.mark.parametrize("name", UNFIT)
def test_a_server_that_would_not_survive_pushes_or_tells_no_true_log_probs_is_known_by_its_settings(name: str) -> None:
    settings, message = UNFIT[name]
    (found,) = read_server_info(FIT | settings).hindrances(2, "none", SamplingBody.__annotations__)
    assert re.search(message, found)
    fit = read_server_info(FIT)
    assert not list(fit.hindrances(2, "none", SamplingBody.__annotations__)) and (fit.tensor, fit.room) == (2, 126)
    assert not list(read_server_info({}).hindrances(2, "none", ())), "one that says nothing of itself"


def test_every_parameter_of_sampling_is_named_in_every_request() -> None:
    """Every request names every sampling parameter, because a server may have other defaults."""
    params = generate_body(ASKED, SamplingParams())["sampling_params"]
    assert set(params) == set(SamplingBody.__annotations__)
    bends = {"min_p", "frequency_penalty", "presence_penalty", "min_new_tokens", "ignore_eos", "stop", "stop_token_ids"}
    assert not any(params[name] for name in bends) and params["repetition_penalty"] == params["n"] == 1


# ---- the engine's log-probs against the trainer's


def rollout(gaps: list[list[float]]) -> tuple[Rollout, torch.Tensor]:
    """Returns samples of rows 10, 11, ... with log-probs of -1, and the trainer's, which are lower by `gaps`."""
    lengths = torch.tensor([len(row) for row in gaps])
    trainers = -1.0 - torch.tensor([gap for row in gaps for gap in row])
    engine = -torch.ones(int(lengths.sum()))
    made = Rollout(
        step=3,
        tokens=torch.zeros(int(lengths.sum()) + len(gaps), dtype=torch.int64),
        seq_lens=lengths + 1,
        prompt_lens=torch.ones_like(lengths),
        group=torch.arange(len(gaps)),
        scores=torch.zeros(len(gaps)),
        rollout_log_probs=engine,
        rows=torch.arange(len(gaps)) + 10,
    )
    return made, trainers


def check(gaps: list[list[float]], skip: int = -1, **limits: float | None) -> tuple[dict[str, float], list[str]]:
    notes: list[str] = []
    made, trainers = rollout(gaps)
    where = torch.ones_like(trainers, dtype=torch.bool)
    if skip >= 0:
        where &= (torch.arange(len(gaps)) != skip).repeat_interleave(made.response_lens)
    metrics = MismatchLimits(MismatchConfig(**limits), notes.append).check(made, trainers, where)
    return metrics, notes


def test_bf16_is_far_from_the_limits() -> None:
    noise = (0.05 * torch.randn(64, 20, generator=torch.Generator().manual_seed(0))).tolist()
    metrics, notes = check(noise)
    assert notes == [] and 0.02 < metrics["mismatch/max_sample"] < 0.2


def test_one_stale_sample_among_many_is_named() -> None:
    gaps = [[0.001] * 50 for _ in range(200)]
    gaps[17] = [4.0, -5.0]
    message = (
        r"step 4: .*sample 17 \(data row 27\) 4\.5 nats a token \(rollout.mismatch.stop_sample = 3\)\. Nothing was"
    )
    with pytest.raises(MismatchError, match=message):
        check(gaps)
    assert check(gaps, skip=17)[1] == [], "what is not of this step's policy is not held against it"
    assert check(gaps, stop_sample=None, warn_sample=None)[1] == []


def check_exact(gaps: list[list[float]], born: list[int], **limits: float | None) -> None:
    made, trainers = rollout(gaps)
    made = replace(made, weight_versions=torch.full((len(gaps),), max(born)), token_weight_versions=torch.tensor(born))
    where, version = torch.ones_like(trainers, dtype=torch.bool), max(born)
    judge = MismatchLimits(MismatchConfig(**limits), print, exact=True)
    judge.check(made, trainers + 0.02, where, version=version, same=False)  # after an update in the same step
    judge.check(made, trainers, where, version=version)


def test_the_weights_of_a_warm_up_are_one_version() -> None:
    """A critic warm-up is one version: four steps without a sync, although restarts named other versions."""
    made, trainers = rollout([[0.01, 0.01, 0.01], [0.02, 0.02, 0.02]])
    made = replace(made, weight_versions=torch.tensor([0, 5]), token_weight_versions=torch.tensor([0, 0, 3, 5, 5, 6]))
    everywhere = torch.ones_like(trainers, dtype=torch.bool)

    said: list[str] = []

    def ages(version: int) -> dict[str, float]:
        found = MismatchLimits(MismatchConfig(), said.append, first_version=4).check(
            made, trainers, everywhere, version=version
        )
        return {name: value for name, value in found.items() if "age_" in name or "staleness" in name}

    assert ages(6).keys() == {"staleness/mean", "staleness/max", *(f"mismatch/age_{age}" for age in (0, 1, 2))}
    assert not said, "below every limit"
    made = replace(made, rollout_log_probs=made.rollout_log_probs + 0.5)
    ages(6)
    assert "of weights up to 2 weight syncs old (rollout.max_staleness): 0.5" in said[0], "a reason"
    assert ages(6)["staleness/max"] == 2 and ages(6)["staleness/mean"] == pytest.approx(8 / 6)
    made = replace(made, token_weight_versions=torch.tensor([0, 0, 2, 2, 3, 3]))
    assert ages(3)["staleness/max"] == 0


def test_in_float32_less_is_too_far_of_tokens_of_the_weights_of_now() -> None:
    """In float32 a smaller gap is refused for tokens of the newest weights, though bf16 might cause it. Tokens of other
    weights, and of an already updated policy, may differ more."""
    noise, off = [[2e-5, 4e-5, 1e-4]] * 3, [2e-5, 0.02, 0.01]
    message = r"step 4: .*float32, .* the 12 tokens .* with the weights of step 7: 0\.0025 nats a token in the mean "
    with pytest.raises(
        MismatchError, match=message + r".*exact = 0\.001\); furthest sample 3 \(data row 13\) 0\.01\. "
    ):
        check_exact([*noise, off], [7] * 12)
    many = [*noise * 100, [0.2] * 2]
    with pytest.raises(MismatchError, match=r": sample 300 \(data row 310\) 0\.2 .*exact_sample = 0\.1\); furthest"):
        check_exact(many, [7] * 902, exact=None)
    for gaps, born, limits in (
        (noise, [7] * 9, {}),
        ([*noise, off], [7] * 10 + [6] * 2, {}),
        (many, [7] * 902, {"exact": None, "exact_sample": 0.3}),
    ):
        check_exact(gaps, born, **limits)
    assert check([*noise, off])[1] == [], "engine or trainer computes in something else"


def test_all_a_little_off_is_seen_in_the_mean_and_warned_of_first() -> None:
    _, (note,) = check([[0.5] * 4] * 8)
    assert note.startswith("step 4: ") and "0.5 nats a token in the mean (rollout.mismatch.warn = 0.2)" in note
    with pytest.raises(MismatchError, match=re.escape("1.2 nats a token in the mean (rollout.mismatch.stop = 1)")):
        check([[1.2] * 4] * 8)


def test_many_are_counted_and_the_worst_named() -> None:
    with pytest.raises(MismatchError, match=r"sample 19 \(data row 29\) 23, sample 18 .*and 12 more nats a token"):
        check([[4.0 + n] * 3 for n in range(20)])


@pytest.mark.parametrize("form", ['{"error": {"message": "%s"}}', '{"message": "%s"}', '{"detail": ["%s"]}', "%s"])
def test_pictures_that_an_engine_repeats_are_not_shown(form: str) -> None:
    said = form % ("no picture: data:image/png;base64," + "iVBORw0KGgo" * 1000 + " (request 7)")
    assert "base64,... (request 7)" in error_message(said.encode())
    assert "iVBOR" not in error_message(said.replace("/", "\\/").encode())


def test_the_page_of_another_service_is_named_in_one_line() -> None:
    page = b"<!DOCTYPE HTML>\n<html lang='en'>\n<body>\n<p>Error code: 404</p></body></html>\n"
    assert error_message(page) == "an HTML page, from another service"


def test_an_engine_s_words_do_not_move_the_terminal() -> None:
    said = "bad\x1b[2J\x07\r\x9b1A token \u00e9\n\tat line 3"
    cleaned = "bad?[2J???1A token \u00e9\n\tat line 3"
    assert error_message(json.dumps({"message": said}).encode()) == cleaned
    reply = httpx.Response(200, json={"success": False, "message": said})
    with pytest.raises(EngineError) as caught:
        client_of(reply).update_weight_version("1")
    assert caught.value.text == cleaned
