"""What the transformers engine imports, some of it late."""

import transformers.models.auto.modeling_auto  # noqa: F401
import transformers.models.llama.modeling_llama  # noqa: F401

import mrl.rollout.transformers_engine.worker  # noqa: F401
