"""Rollouts: engines that turn prompts into samples, and the client through which weights reach them."""

from __future__ import annotations

from mrl.rollout.access import Access
from mrl.rollout.agent import Agent, Home, Offered
from mrl.rollout.client import EngineClient
from mrl.rollout.engine import Engine
from mrl.rollout.errors import EngineError, EngineStartError, LacksWeights, RolloutError, ServerLost
from mrl.rollout.launch import Part
from mrl.rollout.load import Load
from mrl.rollout.protocol import RELEASED_PARTS, MemoryPart
from mrl.rollout.request_queue import RequestQueue
from mrl.rollout.seeds import sample_seed
from mrl.rollout.start import Others, join_engines, start_agent, start_engine

__all__ = [
    "RELEASED_PARTS",
    "Access",
    "Agent",
    "Engine",
    "EngineClient",
    "EngineError",
    "EngineStartError",
    "Home",
    "LacksWeights",
    "Load",
    "Offered",
    "Others",
    "MemoryPart",
    "Part",
    "RequestQueue",
    "RolloutError",
    "ServerLost",
    "join_engines",
    "sample_seed",
    "start_agent",
    "start_engine",
]
