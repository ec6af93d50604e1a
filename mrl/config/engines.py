"""Table of the engines that `rollout.engine` can name."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import BeforeValidator, Field
from pydantic_core import PydanticKnownError


@dataclass(frozen=True)
class EngineKind:
    """An inference engine that implements `mrl.inference.protocol`.

    Attributes:
        launch: `module:function`, a function mrl.inference.launch.ServerSpec -> Launch; imported when a run starts the
            engine
        ignores: keys of `rollout` without effect on this engine
        is_plain: weights arrive as CPU tensors or files only, neither by CUDA IPC nor by a process group
        returns_experts: can return the routed experts of each token
        cpu_imports: module that imports everything the engine needs, for the fork server (mrl.inference.fork_server),
            which forks engines on a CPU; None: always started as a new process
    """

    launch: str
    ignores: tuple[str, ...] = ()
    is_plain: bool = True
    returns_experts: bool = False
    cpu_imports: str | None = None


ENGINES = {
    "sglang": EngineKind(
        "mrl.inference.sglang.command:sglang_launch",
        is_plain=False,
        returns_experts=True,
        cpu_imports="mrl.inference.sglang.cpu_imports",
    ),
    "transformers": EngineKind(
        "mrl.inference.transformers_engine.command:transformers_launch",
        ignores=("tensor", "memory_fraction", "deterministic", "quantization", "server_args"),
        returns_experts=True,
        cpu_imports="mrl.inference.transformers_engine.cpu_imports",
    ),
}


def _in_the_table(name: Any) -> Any:
    if isinstance(name, str) and name in ENGINES:
        return name
    raise PydanticKnownError("literal_error", {"expected": " or ".join(f"'{known}'" for known in ENGINES)})


EngineName = Annotated[str, Field(description=" | ".join(ENGINES)), BeforeValidator(_in_the_table)]
