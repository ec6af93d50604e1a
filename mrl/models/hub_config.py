"""A model's config.json as transformers reads it."""

from __future__ import annotations

from functools import cache
from typing import Any


@cache
def hub_config(hf_path: str) -> Any:
    """The PretrainedConfig of this directory, read once a process (tens of milliseconds where a model sees): not to be
    changed. Raises whatever transformers makes of a file that it cannot read."""
    from transformers import AutoConfig

    return AutoConfig.from_pretrained(hf_path, trust_remote_code=False, local_files_only=True)
