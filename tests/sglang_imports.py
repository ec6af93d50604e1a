"""What SGLang's processes import, some of it late; and all models, as copies serve different ones."""

import sglang.srt.entrypoints.http_server  # noqa: F401
from sglang.srt.models.registry import ModelRegistry

ModelRegistry.get_supported_archs()
