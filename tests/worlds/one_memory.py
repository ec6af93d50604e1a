"""One process: an actor that offloads its memory and reloads it. Usage: one_memory.py MODEL_DIR OFFLOAD.

Prints {"allocated", "reserved": bytes of the GPU's memory by offload level (0 on a CPU), "parts": of the model,
"pinned", "same": true if an update after the moves is bitwise equal to one without them}.
"""

from __future__ import annotations

import json
import sys

import torch
from checkpoint_tools import OPTIMIZER, train, weights_of
from memory import parts

from mrl import platform
from mrl.config.schema import TrainConfig
from mrl.families import load_arch
from mrl.learner import Learner
from mrl.learner.memory import LEVELS
from mrl.parallel import Meshes


def main() -> None:
    model, offload = sys.argv[1:]
    platform.init_process_group(120)
    gpu = platform.device().type == "cuda"
    mesh = Meshes(120).get(TrainConfig().parallel)

    def build(offload: str) -> Learner:
        settings = TrainConfig(optimizer=OPTIMIZER, max_tokens_per_microbatch=128, offload=offload)  # type: ignore[arg-type]
        arch = load_arch(model)
        return Learner("policy", arch, model, settings, mesh, dtype=torch.bfloat16, seed=1, from_scratch=True)

    still, moving = build("none"), build(offload)
    for learner in (still, moving):
        train({"actor": learner}, range(2))
    allocated, reserved = {}, {}
    for name, level in (*((level, level) for level in reversed(LEVELS)), ("all again", LEVELS[-1])):
        moving.memory.move(level)
        platform.release_cached_memory()
        allocated[name] = torch.cuda.memory_allocated() if gpu else 0
        reserved[name] = torch.cuda.memory_reserved() if gpu else 0
    for learner in (still, moving):
        train({"actor": learner}, range(2, 4))
    weights = [weights_of({"actor": learner}) for learner in (still, moving)]
    room = moving.memory._rooms["optimizer"]._buffer
    found = {
        "allocated": allocated,
        "reserved": reserved,
        "parts": parts(moving),
        "pinned": room is not None and room.is_pinned() == gpu,
        "same": all(torch.equal(tensor, weights[1][name]) for name, tensor in weights[0].items()),
    }
    print(json.dumps(found))
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
