"""/generate bodies from requests, and samples from /generate answers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mrl.core import Request, Sample, SamplingParams


def generate_body(requests: Sequence[Request], sampling: SamplingParams) -> dict[str, Any]:
    """One call for several requests: lists of token ids and of sampling parameters, in order."""
    shared: dict[str, Any] = {
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "max_new_tokens": sampling.max_new_tokens,
        "skip_special_tokens": False,
        "no_stop_trim": True,
    }
    if sampling.stop:
        shared["stop"] = list(sampling.stop)
    if sampling.stop_token_ids:
        shared["stop_token_ids"] = list(sampling.stop_token_ids)
    return {
        "input_ids": [list(request.prompt.token_ids) for request in requests],
        "sampling_params": [{**shared, "sampling_seed": request.seed} for request in requests],
        "return_logprob": True,
    }


class BadAnswer(ValueError):
    """The engine answered 200 with something that is not what was asked for."""


def read_samples(requests: Sequence[Request], answer: Any) -> list[Sample]:
    """One Sample a request. Raises BadAnswer if tokens, log-probs and requests do not match up."""
    answers = answer if isinstance(answer, list) else [answer]
    if len(answers) != len(requests):
        raise BadAnswer(f"{len(requests)} requests, {len(answers)} answers")
    return [_read(request, one) for request, one in zip(requests, answers)]


def _read(request: Request, answer: dict[str, Any]) -> Sample:
    meta = answer["meta_info"]
    ids = [int(token) for token in answer["output_ids"]]
    pairs = meta.get("output_token_logprobs") or []
    if [pair[1] for pair in pairs] != ids:
        raise BadAnswer(
            f"sample {request.sample_id}: {len(ids)} tokens came with log-probs of {len(pairs)} tokens, or of others"
        )
    reason = meta.get("finish_reason") or {}
    if reason.get("type") == "abort":
        raise BadAnswer(
            f"sample {request.sample_id}: aborted by the engine: {reason.get('message', 'no reason given')}"
        )
    return Sample(
        request=request,
        response_ids=ids,
        log_probs=[float(pair[0]) for pair in pairs],
        finish_reason=str(reason.get("type")),
        weight_version=str(meta.get("weight_version")),
    )
