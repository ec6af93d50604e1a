"""Scores of images from a worker pool of each rank or from a server, computed while the next images are sampled."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from typing import Any

from torch import Tensor

from mrl import failure
from mrl.config.builtin_rewards import IMAGE_SCORER
from mrl.config.sections.diffusion import ImageRewardConfig
from mrl.diffusion.conditioning import PromptRow
from mrl.parallel import CollectiveErrorCheck
from mrl.parallel.error_check import by_reason
from mrl.reward.errors import RewardError, SampleError
from mrl.reward.plan import Component, component_name
from mrl.reward.pool import FunctionPool
from mrl.reward.score_requests import Outcome, ScoreRequest
from mrl.reward.server import ServerClient


class SamplingErrorCheck(CollectiveErrorCheck[str]):
    """Collective error check: a failure of one rank during sampling raises on all."""

    def report(self, error: BaseException) -> str:
        return failure.describe(error)

    def combined_error(self, what: str, reports: Mapping[int, str]) -> RewardError:
        return RewardError(f"{what} failed: {by_reason(reports)}")


class ImageRewards:
    """Image rewards of one rank. The constructor returns once a worker has loaded the function; RewardError if that
    fails."""

    def __init__(self, cfg: ImageRewardConfig) -> None:
        self._component, self._source = _source(cfg)
        self._running: dict[int, Future[list[Outcome | SampleError]]] = {}  # by the first sample

    def submit(self, ids: range, images: Tensor, prompts: Sequence[PromptRow], step: int) -> None:
        """Submits images [n, C, H, W] in 0..1, samples `ids` of the step, for scoring."""
        levels = (images * 255).round().byte().numpy()
        calls = [
            ScoreRequest(each.text, "", each.row, image=image) for image, each in zip(levels, prompts, strict=True)
        ]
        labels = [f"step {step + 1}, sample {i} (prompt {each.text!r})" for i, each in zip(ids, prompts, strict=True)]
        self._running[ids.start] = self._source.submit(self._component, calls, labels)

    def collect(self) -> list[Outcome]:
        """Returns the outcomes of all samples submitted since the last call, in sample order.

        Raises SampleError, which names the sample, if a call failed, timed out, or returned no finite score.
        """
        running, self._running = self._running, {}
        outcomes: list[Outcome] = []
        for outcome in (each for first in sorted(running) for each in running[first].result()):
            if isinstance(outcome, SampleError):
                raise outcome
            outcomes.append(outcome)
        return outcomes

    def close(self) -> None:
        """Stops workers and connections; safe to call twice."""
        self._source.close()


def _source(cfg: ImageRewardConfig) -> tuple[Component, FunctionPool | ServerClient]:
    if cfg.server is not None:
        return Component("server", "server", "server", "server"), ServerClient("server", cfg.server)
    assert cfg.function is not None
    component = Component(component_name(cfg.function), cfg.function, "images", "function")
    settings = {IMAGE_SCORER: cfg.scorer.model_dump()} if cfg.scorer is not None else {}
    return component, FunctionPool((component,), settings, "", cfg.workers, cfg.timeout_s)


def parts_of(outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """Returns reward/NAME: the mean of each further number that the function returned."""
    names = sorted({name for outcome in outcomes for name in outcome.parts})
    found = {name: [outcome.parts[name] for outcome in outcomes if name in outcome.parts] for name in names}
    return {f"reward/{name}": sum(values) / len(values) for name, values in found.items()}
