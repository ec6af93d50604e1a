"""Responses of several turns, between which a program of the user's has its say."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from mrl.config.sections.base import FilePath, NonNegativeInt, PositiveFloat, PositiveInt, Section
from mrl.config.sections.reward import SandboxConfig


class AgentConfig(Section):
    """Responses of several turns. Between two of them an environment, a program of yours, says something, which the
    model reads and never learns. `reward.function: environment` is the score that it gives."""

    # path/to/file.py:name, `async def rollout(ctx, prompt)` or a class with reset(row, rng) and step(turn)
    rollout: FilePath
    # the format of the tool calls that are read from a turn: hermes (Qwen 2.5 and 3), qwen3_coder, glm45 (GLM 4.5 to
    # 4.7), deepseek_v3, deepseek_v31, kimi_k2, gpt_oss (harmony), fenced (blocks of code), or path/to/file.py:name of a
    # function of the text and the tools' declarations; null: none are read
    parser: FilePath | None = None
    sandbox: SandboxConfig = SandboxConfig()  # of programs that the model wrote, which `ctx.sandbox` runs
    max_turns: PositiveInt = 8  # of the model's, each of rollout.sampling.max_new_tokens at most
    max_tokens: PositiveInt = 8192  # prompt, turns and what the environment says, at most
    workers: Annotated[int, Field(gt=0, le=256)] = 2  # processes that environments run in
    step_timeout_s: PositiveFloat = 30.0  # seconds of an environment between two turns; its process is ended then
    # seconds of a trajectory from its beginning: set-up, turns, and what it waits for others in its wave; one that
    # takes longer is begun again as one that hangs. null: as long as its turns and steps may take
    trajectory_timeout_s: PositiveFloat | None = None
    retries: NonNegativeInt = 1  # of a trajectory whose program raised, ended or hung
    # of one that has failed more often: the run ends, or it is left out of its group, of baselines and of the loss
    on_error: Literal["stop", "leave_out"] = "stop"
    # of chat templates that show earlier turns without them after a new user message. keep: nothing is taken back, and
    # such a message is refused; strip: each user message begins a new sequence, as the template shows it all
    thoughts: Literal["keep", "strip"] = "keep"
    # programs get an address and a key (`ctx.endpoint`) for clients of OpenAI's chat completions, and no `ctx.generate`
    endpoint: bool = False
