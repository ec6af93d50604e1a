"""Configurations of verl's programs: objects such as OmegaConf's, or plain mappings."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def read(config: Any, *keys: str) -> Any:
    """Returns the value of a nested key; None if there is none."""
    for key in keys:
        config = config.get(key) if isinstance(config, Mapping) else getattr(config, key, None)
    return config
