"""Plays trajectories of agents without a run."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

from mrl.agents.runner import AgentRunner
from mrl.core import Request, Sample, SamplingParams


def play_all(
    agents: AgentRunner,
    requests: Sequence[Request],
    params: SamplingParams,
    generate: Callable[[list[Request], Any], list[Sample]],
    turn_s: float = 0.0,
) -> list[Sample]:
    """Returns the sample of each request. `generate` answers a list of requests after `turn_s` seconds."""

    async def turn(request: Request, params: SamplingParams) -> Sample:
        await asyncio.sleep(turn_s)
        return generate([request], params)[0]

    async def play() -> list[Sample]:
        return await asyncio.gather(*(agents.play(request, params, turn) for request in requests))

    return asyncio.run(play())
