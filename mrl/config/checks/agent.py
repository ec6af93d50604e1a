"""Checks of section `agent`: program, lengths, and settings that exclude multi-turn rollouts."""

from __future__ import annotations

import ast
from collections.abc import Generator, Iterator

from mrl.config import verifiers_environments
from mrl.config.checks.base import without_effect
from mrl.config.checks.reward import definition
from mrl.config.problems import Problem
from mrl.config.schema import AgentConfig, RLConfig

KEY, PARSER, ENVIRONMENT = "agent.rollout", "agent.parser", "environment"
PARSERS = ("hermes", "qwen3_coder", "glm45", "deepseek_v3", "deepseek_v31", "kimi_k2", "gpt_oss", "fenced")


def check(cfg: RLConfig) -> Iterator[Problem]:
    agent, reward = cfg.agent, cfg.reward
    named = (reward.function, *reward.functions.values(), *(name for mix in reward.recipe.values() for name in mix))
    if agent is None:
        if ENVIRONMENT in named:
            message = "environment is the score of an agent's environment: add a section `agent:`"
            yield Problem(("reward", "agent"), message)
        return
    first, turn = cfg.data.max_prompt_tokens, cfg.rollout.sampling.max_new_tokens
    if first + turn > agent.max_tokens:
        message = f"{first} prompt tokens + {turn} new tokens of the first turn exceed {agent.max_tokens}"
        yield Problem(("agent.max_tokens", "data.max_prompt_tokens", "rollout.sampling.max_new_tokens"), message)
    if cfg.algorithm.adv_estimator == "optimal_token_baseline":
        message = "compares tokens by position, and turns start at different ones: use tir_optimal_token_baseline"
        yield Problem(("algorithm.adv_estimator", "agent"), message)
    if not cfg.data.chat_template:
        for key, is_set in (("agent.endpoint", agent.endpoint), ("agent.thoughts", agent.thoughts == "strip")):
            if is_set:
                yield Problem((key, "data.chat_template"), "needs a chat template: set data.chat_template: true")
    if agent.endpoint and agent.thoughts == "strip":
        message = "has no effect: with agent.endpoint the harness sends the history: leave thoughts out"
        yield Problem(("agent.thoughts", "agent.endpoint"), message)
    if agent.trajectory_timeout_s is not None and agent.trajectory_timeout_s < agent.step_timeout_s:
        message = f"{agent.step_timeout_s:g} s for a step exceed {agent.trajectory_timeout_s:g} s for a trajectory"
        yield Problem(("agent.step_timeout_s", "agent.trajectory_timeout_s"), message)
    if agent.sandbox.wall_s > agent.step_timeout_s:
        because = f"a step is ended after {agent.step_timeout_s:g} s, before a program in it reaches this limit"
        yield from without_effect(agent.sandbox, "agent.sandbox", ["wall_s"], because, "agent.step_timeout_s")
    if "overlong" in named or reward.manager == "dapo":
        message = "overlong counts the tokens of all turns, and its limit, rollout.sampling.max_new_tokens, is that of "
        message += "one turn: leave it out, or score the length in a function of your own"
        yield Problem(("reward.manager" if reward.manager == "dapo" else "reward", "agent"), message)
    if agent.on_error == "leave_out" and cfg.algorithm.needs_greedy:
        message = f"{cfg.algorithm.adv_estimator} needs the greedy response of every group: set on_error: stop"
        yield Problem(("agent.on_error", "algorithm.adv_estimator"), message)
    models = ["reward.model"] if reward.model is not None else []
    for key in models + [f"reward.servers.{name}.api" for name, each in reward.servers.items() if each.api == "sglang"]:
        yield Problem((key, "agent"), "a reward model scores single responses, not the turns of an agent: leave it out")


def check_file(agent: AgentConfig) -> Iterator[Problem]:
    """Checks that the files define the program and a custom parser; parses the files, without running them."""
    found = yield from _program(agent)
    if agent.endpoint and isinstance(found, ast.ClassDef):
        yield Problem(
            (KEY, "agent.endpoint"), f"{found.name} is a class; agent.endpoint needs a function (ctx, prompt)"
        )
    whose = f"the class {found.name}" if isinstance(found, ast.ClassDef) else "an environment of verifiers"
    if isinstance(found, ast.ClassDef) or verifiers_environments.is_environment(agent.rollout):
        because = f"{whose} gets no ctx, and this section is for `ctx.sandbox`"
        yield from without_effect(agent, "agent", ["sandbox"], because, KEY)
    if isinstance(found, ast.FunctionDef) and not agent.endpoint:
        yield Problem((KEY,), f"{found.name} awaits turns: define it as `async def {found.name}(ctx, prompt)`")
    if agent.parser is not None and agent.parser not in PARSERS:
        own = yield from _defined(PARSER, agent.parser, f"none of {', '.join(PARSERS)}, and ")
        if isinstance(own, ast.AsyncFunctionDef):
            yield Problem((PARSER,), f"{own.name} is an async function, and mrl does not await it: use a plain def")


def _program(agent: AgentConfig) -> Generator[Problem, None, ast.stmt | None]:
    """Returns the definition of the program, None for an environment of verifiers; or yields why there is none."""
    if not verifiers_environments.is_environment(agent.rollout):
        return (yield from _defined(KEY, agent.rollout))
    if problem := verifiers_environments.name_problem(agent.rollout):
        yield Problem((KEY,), f"cannot use {agent.rollout}: {problem}")
    if not agent.endpoint:
        yield Problem((KEY, "agent.endpoint"), "verifiers requests turns at the endpoint: set agent.endpoint: true")
    return None


def _defined(key: str, spec: str, but: str = "") -> Generator[Problem, None, ast.stmt | None]:
    """Returns the definition that `path/to/file.py:name` names, or yields why there is none. `but`: prefix of the
    message."""
    path, _, name = spec.rpartition(":")
    if path and name:
        return (yield from definition(key, path, name))
    yield Problem((key,), f"{spec!r} is {but}not path/to/file.py:name")
    return None
