"""Responses that are generated in several requests, with the weights of each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from mrl.core import Request, Sample
from mrl.rollout.routed import joined, whole


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
