"""A model's config.json as read by transformers."""

from __future__ import annotations

from functools import cache
from typing import Any


@cache
def hub_config(hf_path: str) -> Any:
    """Returns the PretrainedConfig of this directory, cached per process (reading a vision model takes tens of
    milliseconds).

    Do not modify it. Raises whatever transformers raises for a file that it cannot read.
    """
    from transformers import AutoConfig

    return AutoConfig.from_pretrained(hf_path, trust_remote_code=False, local_files_only=True)
