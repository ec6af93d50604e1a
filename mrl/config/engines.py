"""The engines that `rollout.engine` can name: a line for each."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import BeforeValidator, Field
from pydantic_core import PydanticKnownError


@dataclass(frozen=True)
class EngineKind:
    """A program that answers `mrl.rollout.protocol`.

    launch: `module:function` of mrl.rollout.launch.ServerSpec -> Launch, imported when a run starts such an engine
    ignores: keys of `rollout` that have no effect on it
    is_plain: its weights reach it as CPU tensors or files, neither in GPU memory nor by a process group
    pauses: it can stop in the middle of its requests, and go on with them by other weights
    returns_experts: it can say which experts each token went to
    cpu_imports: the module that has its imports, where it can be a copy of a process on a CPU (mrl.rollout.fork_server)
    """

    launch: str
    ignores: tuple[str, ...] = ()
    is_plain: bool = True
    pauses: bool = False
    returns_experts: bool = False
    cpu_imports: str | None = None


ENGINES = {
    "sglang": EngineKind(
        "mrl.rollout.sglang.command:sglang_launch",
        is_plain=False,
        pauses=True,
        returns_experts=True,
        cpu_imports="mrl.rollout.sglang.cpu_imports",
    ),
    "transformers": EngineKind(
        "mrl.rollout.transformers_engine.command:transformers_launch",
        ignores=("tensor", "memory_fraction", "quantization", "server_args"),
        returns_experts=True,
        cpu_imports="mrl.rollout.transformers_engine.cpu_imports",
    ),
}


def _in_the_table(name: Any) -> Any:
    if isinstance(name, str) and name in ENGINES:
        return name
    raise PydanticKnownError("literal_error", {"expected": " or ".join(f"'{known}'" for known in ENGINES)})


EngineName = Annotated[str, Field(description=" | ".join(ENGINES)), BeforeValidator(_in_the_table)]
