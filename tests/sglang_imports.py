"""What SGLang's processes import, some of it late."""

import sglang.srt.entrypoints.http_server  # noqa: F401
import sglang.srt.models.registry  # noqa: F401
