"""Inference engines: start, requests, restarts and weight-sync client."""

from __future__ import annotations

from mrl.inference.access import Access
from mrl.inference.agent import Agent, Home, Offered
from mrl.inference.client import EngineClient
from mrl.inference.engine import Engine
from mrl.inference.errors import EngineError, EngineStartError, RolloutError
from mrl.inference.launch import Part
from mrl.inference.load import Load
from mrl.inference.protocol import RELEASED_PARTS, MemoryPart
from mrl.inference.seeds import sample_seed
from mrl.inference.start import Others, join_engines, start_engine, start_servers

__all__ = [
    "RELEASED_PARTS",
    "Access",
    "Agent",
    "Engine",
    "EngineClient",
    "EngineError",
    "EngineStartError",
    "Home",
    "Load",
    "Offered",
    "Others",
    "MemoryPart",
    "Part",
    "RolloutError",
    "join_engines",
    "sample_seed",
    "start_engine",
    "start_servers",
]
