"""Program of an environment of the package verifiers: the environment plays by itself, as a client of the endpoint.

It makes prompts, tools and turns, and its rubric scores them, as in an evaluation by the package.
"""

from __future__ import annotations

from typing import Any

from mrl.agents.chat import MODEL
from mrl.agents.context import Context, Program
from mrl.agents.tool_call_parsers import Parser
from mrl.config import verifiers_environments
from mrl.user_functions import FunctionError


def load_environment_program(name: str, parser: Parser | None) -> Program:
    """Returns the program of `verifiers:NAME`. Raises FunctionError for an environment that mrl cannot play."""
    try:
        environment = verifiers_environments.load(name)
        if problem := _problem(environment, parser):
            raise ValueError(problem)
    except ValueError as error:
        raise FunctionError(f"agent.rollout {name!r}: {error}") from error
    import verifiers
    from openai import AsyncOpenAI

    scored = (verifiers.EmptyModelResponseError, verifiers.ToolError)  # the model's errors, which the rubric scores
    client = AsyncOpenAI(base_url="http://127.0.0.1", api_key="-", timeout=None)  # slow to make: one for all

    async def play(ctx: Context, prompt: str) -> dict[str, float]:
        assert ctx.endpoint is not None
        own = client.with_options(base_url=ctx.endpoint.url, api_key=ctx.endpoint.key)
        state = await environment.rollout(dict(ctx.row), own, MODEL, {})
        if (error := state["error"]) is not None and not isinstance(error, scored):
            raise error
        await environment.rubric.score_group([state])
        return {**state["metrics"], "score": state["reward"]}

    return play


def _problem(environment: Any, parser: Parser | None) -> str | None:
    """Returns why mrl cannot play the environment; None if it can."""
    import verifiers

    if not isinstance(environment, verifiers.MultiTurnEnv | verifiers.EnvGroup):
        return f"it is a {type(environment).__name__}, not a SingleTurnEnv, MultiTurnEnv or ToolEnv"
    if environment.message_type != "chat":
        return "it asks for completions of plain text, and the endpoint answers chats only"
    rubric = environment.rubric
    if grouped := [each.__name__ for each in rubric._get_reward_funcs() if rubric._is_group_func(each)]:
        return f"its reward {', '.join(grouped)} compares the answers of a group, and mrl scores each by itself"
    if getattr(environment, "oai_tools", None) and parser is None:
        return "it has tools: set agent.parser to the model's format of tool calls"
    return None
