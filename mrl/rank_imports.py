"""Imports of the ranks, including late ones, for their fork server (`launcher/fork_server.py`)."""

from mrl import platform

platform.install()

import torch._dynamo  # noqa: E402, F401 (torch's optimizers import it)
import transformers.modeling_rope_utils  # noqa: E402, F401
import transformers.models.auto.tokenization_auto  # noqa: E402, F401

import mrl.checkpoint  # noqa: E402, F401
from mrl.config.trainers.table import TRAINERS  # noqa: E402
from mrl.kernels import native  # noqa: E402

if not platform.is_built_for_gpus():
    native.problem()  # finds or builds the library

for trainer in TRAINERS.values():
    if not trainer.packages:  # optional packages may be absent, and would slow down all other trainers
        trainer.load_loop()
