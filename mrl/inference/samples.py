"""Conversion of requests to bodies of HTTP requests, and of answers to samples, also of several answers to one."""

from __future__ import annotations

import base64
import gc
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any
from uuid import uuid4

import numpy as np

from mrl.core import Prompt, Request, Sample, SamplingParams
from mrl.inference.answers import field, from_json, shown
from mrl.inference.errors import BadAnswer
from mrl.inference.protocol import GenerateBody, SamplingBody
from mrl.inference.routed import RoutedShape, joined, whole

ABOVE_ZERO = 1e-3  # what rounding may make of a log-prob of 0
LARGEST = float(np.finfo(np.float32).max)  # as which samples keep them
FINISH_REASONS = ("stop", "length")
SHARED_TOKENS = 32  # tokens of a shared prompt from which on a prefill request of its own pays
CALL_BYTES, TOKEN_BYTES = 1 << 20, 512  # of an answer at most; of a token: id, log-prob, text


def sampling_body(sampling: SamplingParams, seed: int) -> SamplingBody:
    """Every parameter, also what has no effect: a server may have defaults of its own for what is left out."""
    return {
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "min_p": 0.0,
        "frequency_penalty": 0.0,
        "presence_penalty": 0.0,
        "repetition_penalty": 1.0,
        "min_new_tokens": 0,
        "max_new_tokens": sampling.max_new_tokens,
        "stop": list(sampling.stop),
        "stop_token_ids": list(sampling.stop_token_ids),
        "ignore_eos": False,
        "n": 1,
        "sampling_seed": seed,
        "skip_special_tokens": False,
        "no_stop_trim": True,
    }


def scoring_body(ids: list[int], start: int, top_k: int) -> GenerateBody:
    """Returns the body of a request that generates nothing. It asks for the log-prob of each token after `ids[start]`,
    and for the top_k most likely tokens at its position."""
    body: GenerateBody = {
        "input_ids": ids,
        "sampling_params": sampling_body(SamplingParams(max_new_tokens=0), seed=0),
        "return_logprob": True,
        "logprob_start_len": start,
    }
    return {**body, "top_logprobs_num": top_k} if top_k else body


def generate_body(
    request: Request, sampling: SamplingParams, adapter: str | None = None, *, experts: bool = False
) -> GenerateBody:
    """Returns the body of one request. adapter: name of the LoRA adapter to sample with; experts: ask for routed
    experts."""
    prompt = request.prompt
    body: GenerateBody = {
        "input_ids": list(prompt.unexpanded_token_ids or prompt.token_ids),
        "sampling_params": sampling_body(sampling, request.seed),
        "rid": uuid4().hex,
        "return_logprob": True,
    }
    if prompt.pictures:  # only what mrl has encoded itself: servers open paths and URLs
        body["image_data"] = ["data:image/png;base64," + base64.b64encode(png).decode() for png in prompt.pictures]
    if experts:
        body["return_routed_experts"] = True
        if request.routed_experts_start:
            body["routed_experts_start_len"] = request.routed_experts_start
    if adapter is not None:
        body["lora_path"] = adapter
    return body


def prefill_body(
    requests: Sequence[Request], sampling: SamplingParams, adapter: str | None = None
) -> GenerateBody | None:
    """Returns the request that prefills the prompt of these into the prefix cache and generates no token, or None if
    that does not pay. Requests that arrive in one batch do not find each other's prompt in the cache."""
    prompt = requests[0].prompt
    if len(requests) == 1 or len(prompt.token_ids) < SHARED_TOKENS or prompt.pictures:
        return None
    return generate_body(requests[0], replace(sampling, max_new_tokens=0), adapter)


@dataclass(frozen=True)
class Expected:
    """Properties that every sample must have.

    versions: names of the weights that may have generated it; None: any
    is_interruptible: an answer may hold the beginning of a response, which ends with "abort"
    routed: shape of the routed experts, where they are asked for
    """

    vocab_size: int
    max_new_tokens: int
    versions: Collection[str] | None = None
    is_interruptible: bool = False
    routed: RoutedShape | None = None


def most_bytes(request: Request, expected: Expected) -> int:
    """Returns the size of the longest valid answer to the request."""
    drawn = expected.max_new_tokens
    tokens = drawn + len(request.prompt.token_ids)
    return CALL_BYTES + TOKEN_BYTES * drawn + (tokens * expected.routed.token_bytes if expected.routed else 0)


@contextmanager
def _no_collections() -> Iterator[None]:
    """Pauses the garbage collector: looking through the lists of every token takes four fifths of reading them."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


@_no_collections()
def read_answer(request: Request, content: bytes, expected: Expected, name: str | None = None) -> Sample:
    """Returns the sample of an answer's JSON. name: the `rid` that the request was sent with. Raises BadAnswer, which
    names sample and field, if anything is not as `expected`."""
    answer = from_json(content)
    try:
        meta = field(answer, "meta_info", dict)
        if name is not None and meta.get("id", name) != name:
            raise BadAnswer(f"the answer is to another request ({shown(meta['id'])})")
        reason = _finish_reason(meta, expected.is_interruptible)
        version = field(meta, "weight_version", str)
        if not (expected.versions is None or version in expected.versions):
            given = ", ".join(map(repr, sorted(expected.versions)))
            raise BadAnswer(
                f"weight_version is {shown(version)}, but the run gave the engine {given}: somebody else changes its "
                "weights"
            )
        if reason == "abort" and "prompt_tokens" not in meta:  # SGLang's, of a request that waited in its queue
            return Sample(request, np.empty(0), np.empty(0), reason, version)
        _check_prompt(request.prompt, field(meta, "prompt_tokens", int))
        ids = field(answer, "output_ids", list)
        _check_ids(ids, expected)
        log_probs = _log_probs(meta, ids)
        count = len(ids)
        _check_count(count, reason, expected)
        every = None
        if expected.routed is not None and count:
            every = expected.routed.read(meta, len(request.prompt.token_ids) + count, request.routed_experts_start)
        return Sample(request, np.array(ids), log_probs, reason, version, routed_experts=every)
    except BadAnswer as error:
        raise BadAnswer(f"sample {request.sample_id}: {error}") from error


def _check_prompt(prompt: Prompt, seen: int) -> None:
    if seen == len(prompt.token_ids):
        return
    if prompt.pictures:
        raise BadAnswer(
            f"the engine made {seen} tokens of the prompt and its pictures, mrl {len(prompt.token_ids)}: they do not "
            "see the same"
        )
    raise BadAnswer(
        f"prompt_tokens is {seen}, {len(prompt.token_ids)} were sent: the engine did not read the prompt as it is; "
        "does it cut what is too long (--allow-auto-truncate)?"
    )


def _check_count(count: int, reason: str, expected: Expected) -> None:
    if not count and reason != "abort":
        raise BadAnswer("output_ids is empty, not even the token that ended it is there")
    if reason == "length" and count < expected.max_new_tokens:
        raise BadAnswer(
            f"cut off after {count} tokens, max_new_tokens is {expected.max_new_tokens}: the engine has no room for "
            "more (its context length or its KV cache), or a limit of its own"
        )


def _finish_reason(meta: dict[str, Any], is_interruptible: bool) -> str:
    reason = field(meta, "finish_reason", dict)
    kind = field(reason, "type", str)
    if kind == "abort" and not is_interruptible:
        raise BadAnswer(f"aborted by the engine: {shown(reason.get('message', 'no reason given'))}")
    if kind not in (*FINISH_REASONS, "abort"):
        raise BadAnswer(f"finish_reason is {shown(kind)}, expected one of {', '.join(FINISH_REASONS)}")
    return kind


def _check_ids(ids: list[Any], expected: Expected) -> None:
    if not set(map(type, ids)) <= {int}:
        raise BadAnswer(f"output_ids is {shown(ids)}, expected whole numbers")
    if len(ids) > expected.max_new_tokens:
        raise BadAnswer(f"output_ids has {len(ids)} tokens, max_new_tokens is {expected.max_new_tokens}")
    if ids and not 0 <= min(ids) <= max(ids) < expected.vocab_size:
        wrong = min(ids) if min(ids) < 0 else max(ids)
        raise BadAnswer(f"output_ids has token {shown(wrong)}, the vocabulary has {expected.vocab_size}")


def _log_probs(meta: dict[str, Any], ids: list[int]) -> np.ndarray:
    """[tokens] float64."""
    pairs = meta.get("output_token_logprobs") or []  # SGLang leaves it out where there are no tokens
    if type(pairs) is not list or not set(map(type, pairs)) <= {list} or min(map(len, pairs), default=2) < 2:
        raise BadAnswer(f"output_token_logprobs is {shown(pairs)}, expected a list of [log-prob, token, ...]")
    if [pair[1] for pair in pairs] != ids:
        raise BadAnswer(f"{len(ids)} tokens came with output_token_logprobs of {len(pairs)} tokens, or of others")
    values = [pair[0] for pair in pairs]
    if not set(map(type, values)) <= {float, int}:
        raise BadAnswer(f"output_token_logprobs has {shown(values)}, expected numbers")
    try:
        found = np.array(values, dtype=np.float64)
        is_good = bool(((found >= -LARGEST) & (found <= ABOVE_ZERO)).all())
    except OverflowError:  # a whole number that no float is
        is_good = False
    if not is_good:
        wrong = next(value for value in values if not -LARGEST <= value <= ABOVE_ZERO)
        raise BadAnswer(f"output_token_logprobs has {shown(wrong)}, expected finite numbers of at most 0")
    return found


@dataclass(frozen=True)
class PartialResponse:
    """The tokens of a response so far.

    Each request continues as prompt + what the response has, with the same seed. The noise of an engine follows from
    (seed, position), so under the same weights the tokens are those of one request.

    ids [n] int32, log_probs [n] float32; versions [n] int32: of the weights that generated each token
    finish: why it ended; empty: it has not
    experts: as in `Sample`, of the prompt and of all generated tokens but the last; None: not requested
    """

    ids: np.ndarray
    log_probs: np.ndarray
    versions: np.ndarray
    finish: str = ""
    experts: np.ndarray | None = None

    @classmethod
    def empty(cls) -> PartialResponse:
        return cls(np.empty(0, np.int32), np.empty(0, np.float32), np.empty(0, np.int32))

    def longer(self, more: Sample, most: int, stop: Sequence[str] = ()) -> PartialResponse:
        """Adds what the next request has generated.

        Args:
            most: maximum tokens of the whole response.
            stop: texts that end it. If the request was interrupted, tokens that may begin one of them are generated
                again: an engine does not find a text that begins in an earlier request.
        """
        if more.finish_reason == "abort":
            more = _without_last(more, max((len(text.encode()) for text in stop), default=0))
        ids = np.concatenate([self.ids, more.response_ids])
        has_ended = more.finish_reason == "stop" or len(ids) >= most
        version = np.full(len(more.response_ids), int(more.weight_version), np.int32)
        return PartialResponse(
            ids,
            np.concatenate([self.log_probs, more.log_probs]),
            np.concatenate([self.versions, version]),
            (more.finish_reason if more.finish_reason == "stop" else "length") if has_ended else "",
            joined(self.experts, more.routed_experts) if len(more.response_ids) else self.experts,
        )

    def rest_of(self, request: Request) -> Request:
        """Returns the request that continues the response to `request`."""
        if not len(self.ids):
            return request
        prompt, more = request.prompt, tuple(self.ids.tolist())
        text_only = prompt.unexpanded_token_ids
        prompt = replace(
            prompt,
            token_ids=(*prompt.token_ids, *more),
            unexpanded_token_ids=None if text_only is None else (*text_only, *more),
        )
        start = request.routed_experts_start + (0 if self.experts is None else len(self.experts))
        return replace(request, prompt=prompt, routed_experts_start=start)

    def sample(self, request: Request) -> Sample:
        """Returns the finished response as the sample of its request."""
        experts = None if self.experts is None else whole(self.experts)
        own = request, self.ids, self.log_probs, self.finish, str(self.versions[-1])
        return Sample(*own, token_weight_versions=self.versions, routed_experts=experts)


def _without_last(sample: Sample, count: int) -> Sample:
    kept = max(0, len(sample.response_ids) - count)
    dropped, experts = len(sample.response_ids) - kept, sample.routed_experts
    return replace(
        sample,
        response_ids=sample.response_ids[:kept],
        log_probs=sample.log_probs[:kept],
        routed_experts=None if experts is None else experts[: len(experts) - dropped],
    )
