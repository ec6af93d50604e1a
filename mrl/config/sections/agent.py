"""Section `agent`: multi-turn rollouts with an environment of the user's."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from mrl.config.sections.reward import SandboxConfig
from mrl.options.base import FilePath, NonNegativeInt, PositiveFloat, PositiveInt, Section


class AgentConfig(Section):
    """Multi-turn rollouts. Between turns your environment adds text, which the model reads and is never trained on.
    `reward.function: environment` uses the environment's score."""

    # path/to/file.py:name of an `async def rollout(ctx, prompt)`, or of a class with reset(row, rng) and step(turn); or
    # verifiers:NAME?key=value, an installed environment of the package verifiers, which needs `endpoint: true`
    rollout: FilePath
    # parser of tool calls in a turn: hermes (Qwen 2.5 and 3), qwen3_coder, glm45 (GLM 4.5 to 4.7), deepseek_v3,
    # deepseek_v31, kimi_k2, gpt_oss (harmony), fenced (blocks of code), or path/to/file.py:name of a function of the
    # text and the tools' declarations; null: none
    parser: FilePath | None = None
    sandbox: SandboxConfig = SandboxConfig()  # sandbox and limits of programs that the model wrote, for `ctx.sandbox`
    max_turns: PositiveInt = 8  # maximum turns of the model, each of at most rollout.sampling.max_new_tokens
    max_tokens: PositiveInt = 8192  # maximum tokens of prompt, turns and environment text
    workers: Annotated[int, Field(gt=0, le=256)] = 2  # processes that run environments
    # maximum seconds that the environment takes between two turns; then its process is ended
    step_timeout_s: PositiveFloat = 30.0
    # maximum seconds of a trajectory: set-up, turns and steps; a longer one is retried.
    # null: only its turns and steps have limits
    trajectory_timeout_s: PositiveFloat | None = None
    retries: NonNegativeInt = 1  # retries of a trajectory whose program raised, ended or hung
    # after the last retry. stop: end the run; leave_out: leave the trajectory out of its group, baselines and the loss
    on_error: Literal["stop", "leave_out"] = "stop"
    # for chat templates that drop the reasoning of earlier turns after a new user message. keep: the reasoning stays,
    # and a new user message is refused; strip: each user message starts a new sequence, formatted by the template
    thoughts: Literal["keep", "strip"] = "keep"
    # programs get a URL and a key (`ctx.endpoint`) for clients of OpenAI's and Anthropic's APIs, instead of
    # `ctx.generate`
    endpoint: bool = False
