"""Protocols of reward servers: requests and permitted answers."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mrl.reward.images import encode_image
from mrl.reward.loading import check_result
from mrl.reward.score_requests import Outcome, ScoreRequest

BIASED_IN_SGLANG = ("Qwen2ForSequenceClassification", "Qwen3ForSequenceClassification")


class BadResponse(ValueError):
    """Answer of the server that does not have the expected form."""


@dataclass(frozen=True)
class ServerApi:
    """Protocol of a reward server.

    path: below the server's address
    item: one sample as JSON text; raises ValueError, TypeError or RecursionError for values that JSON cannot represent
    body: request body from the items of a call
    results: result of each item in an answer, parsed from JSON; raises BadResponse for another form
    """

    path: str
    item: Callable[[ScoreRequest], str]
    body: Callable[[Sequence[str]], str]
    results: Callable[[Any], list[Any]]


def read_answer(api: ServerApi, data: bytes, count: int) -> list[Outcome | str]:
    """Returns the outcome of each sample, or its error. Raises BadResponse unless there is one result a sample."""
    try:
        answer = json.loads(data)
    except (ValueError, RecursionError) as error:
        reason = "nested too deeply" if isinstance(error, RecursionError) else str(error)
        raise BadResponse(f"the response is not JSON ({reason}): {head(data)}") from None
    results = api.results(answer)
    if len(results) != count:
        raise BadResponse(f"{len(results)} scores for {count} samples")
    return [_outcome(result) for result in results]


def head(data: bytes) -> str:
    """Returns the beginning of an answer, for messages."""
    return repr(data[:200].decode(errors="replace"))


def _outcome(result: Any) -> Outcome | str:
    try:
        return check_result(result)
    except (TypeError, ValueError) as error:
        return str(error)


def _sample(call: ScoreRequest) -> str:
    if call.image is not None:
        png = base64.b64encode(encode_image(call.image, "PNG", compress_level=1)).decode()
        return json.dumps({"prompt": call.prompt, "image": png, "row": call.row}, allow_nan=False)
    found = {"prompt": call.prompt, "response": call.response, "row": call.row}
    if call.pictures is not None:
        found["pictures"] = [base64.b64encode(png).decode() for png in call.pictures]
    return json.dumps(found, allow_nan=False)


def unserializable_value(row: Mapping[str, Any]) -> str | None:
    """Returns the first value of a row that JSON cannot represent, and why; None if there is none."""
    for key, value in row.items():
        try:
            json.dumps(value, allow_nan=False)
        except (TypeError, ValueError, RecursionError) as error:
            return f"{key!r} cannot be sent to a reward server: {error}"
    return None


def _scores(answer: Any) -> list[Any]:
    if not isinstance(answer, dict) or not isinstance(answer.get("scores"), list):
        raise BadResponse(f'expected {{"scores": [...]}}, got {head(json.dumps(answer).encode())}')
    scores: list[Any] = answer["scores"]
    return scores


def _embeddings(answer: Any) -> list[Any]:
    """Returns the scores: a reward model's score is an "embedding" of length 1."""
    if not isinstance(answer, list) or not all(isinstance(item, dict) for item in answer):
        raise BadResponse(f'expected [{{"embedding": [score]}}, ...], got {head(json.dumps(answer).encode())}')
    found = [item.get("embedding") for item in answer]
    for numbers in found:
        if not isinstance(numbers, list) or len(numbers) != 1:
            what = f"{len(numbers)} numbers" if isinstance(numbers, list) else repr(numbers)
            raise BadResponse(f"expected one score per sample, got {what}: check that it serves a reward model")
    return [numbers[0] for numbers in found if numbers is not None]


def known_defect(about: Any) -> str:
    """Returns a known defect of the model of this /model_info; empty if there is none."""
    found = about.get("architectures") if isinstance(about, dict) else None
    names = [name for name in BIASED_IN_SGLANG if isinstance(found, list) and name in found]
    if not names:
        return ""
    return (
        f"serves a {names[0]}, whose score head has a bias in SGLang (0.5.23) but none in transformers. Unless the "
        "checkpoint has score.bias, all scores are off by a constant that changes with each start of the server: use "
        "reward.model.path to run the model in Megatron instead"
    )


MRL = ServerApi("", _sample, lambda items: f'{{"samples": [{", ".join(items)}]}}', _scores)
SGLANG = ServerApi(
    "/classify",
    lambda call: json.dumps(call.token_ids),
    lambda items: f'{{"input_ids": [{", ".join(items)}]}}',
    _embeddings,
)
APIS = {"mrl": MRL, "sglang": SGLANG}
