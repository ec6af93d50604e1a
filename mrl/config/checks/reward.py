"""Checks that the reward settings fit together and that the functions they name exist."""

from __future__ import annotations

import ast
import difflib
import re
from collections import Counter
from collections.abc import Generator, Iterator, Sequence
from pathlib import Path

from mrl.config.builtin_rewards import BUILTIN_REWARDS, RESERVED, WITH_SECTION
from mrl.config.checks.base import without_effect
from mrl.config.problems import Problem, not_a_file, reason
from mrl.config.schema import RewardConfig, RLConfig, ServerConfig

USES = {
    "naive": ("function", "functions"),
    "dapo": ("function", "functions"),
    "batch": ("function",),
    "remote": ("servers",),
    "model": ("servers", "model"),
    "recipe": ("recipe", "servers", "model"),
}
BATCH, MODEL = "batch", "model"
SANDBOX_START_S = 10.0
OF_A_SAMPLE, OF_A_BATCH = ("prompt", "response", "row"), ("prompts", "responses", "rows")
OF_A_GROUP = ("group",)
PLAIN_VALUES = (ast.Constant, ast.Dict, ast.List, ast.Tuple, ast.Set)


def check(cfg: RLConfig) -> Iterator[Problem]:
    """Yields settings that the manager needs and lacks, or has and does not use, and components with equal names."""
    reward = cfg.reward
    if reward.on_error == "leave_out" and cfg.algorithm.needs_greedy:
        message = f"{cfg.algorithm.adv_estimator} needs the score of every greedy response: use stop or zero"
        yield Problem(("reward.on_error", "algorithm.adv_estimator"), message)
    yield from _manager(reward)
    yield from _servers(reward)
    yield from _names(reward)
    yield from _sections(cfg)
    own = any(":" in spec for _, spec in _functions(reward))
    if not own and not any(server.api == "mrl" for server in reward.servers.values()):
        because = "only functions of your files and servers with api: mrl read images"
        yield from without_effect(reward, "reward", ["pictures"], because, "reward.manager")
    if not _functions(reward):
        because = "no function is called"
        yield from without_effect(reward, "reward", ["workers", "timeout_s"], because, "reward.manager")


def check_functions(reward: RewardConfig) -> Iterator[Problem]:
    """Checks that each function is a built-in or defined in its file; parses files, without running them."""
    for key, spec in _functions(reward):
        is_batch = _is_batch(reward, key)
        names = *(OF_A_BATCH if is_batch else OF_A_SAMPLE), *(["pictures"] if reward.pictures else [])
        yield from check_function(key, spec, names, built_in=not is_batch)


def _functions(reward: RewardConfig) -> list[tuple[str, str]]:
    """Returns (key, function) for every function that the manager calls."""
    found = []
    if reward.manager in ("naive", "dapo"):
        found = [("reward.functions", spec) for spec in reward.functions.values()]
    if reward.function is not None and (reward.manager != "recipe" or BATCH in _named(reward)):
        found.append(("reward.function", reward.function))
    if reward.manager == "recipe":
        found += [("reward.recipe", name) for name in _named(reward) if name not in (BATCH, MODEL, *reward.servers)]
    return [] if reward.manager in ("remote", "model") else found


def _is_batch(reward: RewardConfig, key: str) -> bool:
    return key == "reward.function" and reward.manager in ("batch", "recipe")


def _named(reward: RewardConfig) -> list[str]:
    """Returns the distinct components of the recipe."""
    return list(dict.fromkeys(name for mix in reward.recipe.values() for name in mix))


def _manager(reward: RewardConfig) -> Iterator[Problem]:
    manager, where = reward.manager, "reward.manager"
    calls_batch = manager == "batch" or (manager == "recipe" and BATCH in _named(reward))
    uses = [*USES[manager], *(["function"] if calls_batch else [])]
    for name in ("function", "functions", "recipe", "servers", "model"):
        if name not in uses:
            of_recipe = name == "function" and manager == "recipe"
            because = "no recipe names batch" if of_recipe else f"the manager is {manager}"
            yield from without_effect(reward, "reward", [name], because, where)
    if manager in ("naive", "dapo") and not (reward.function or reward.functions):
        yield Problem(("reward.function", where), f"required by {manager}: set it, or functions by data_source")
    if calls_batch and not reward.function:
        yield Problem(("reward.function", where), "required: name the function that is called once with all samples")
    if manager == "recipe" and not reward.recipe:
        yield Problem(("reward.recipe", where), "required by recipe: set components and weights for each data_source")
    if manager == "remote" and len(reward.servers) != 1:
        message = f"remote needs exactly one server, got {len(reward.servers)}: to mix several, use manager: recipe"
        yield Problem(("reward.servers", where), message)
    models = len(reward.servers) + (reward.model is not None)
    if manager == "model" and models != 1:
        message = f"model needs exactly one reward model, here or in reward.servers; got {models}"
        yield Problem(("reward.model", where), message)
    if manager == "recipe" and (reward.model is not None) != (MODEL in _named(reward)):
        message = "has no effect: no recipe uses it" if reward.model else "required: the recipe uses model"
        yield Problem(("reward.model", "reward.recipe"), message)


def check_server(key: str, server: ServerConfig) -> Iterator[Problem]:
    """Checks a scorer behind HTTP, of text or images."""
    if server.retries == 0:
        yield from without_effect(server, key, ["backoff_s"], "there are no retries", f"{key}.retries")


def _servers(reward: RewardConfig) -> Iterator[Problem]:
    for name, server in reward.servers.items():
        key = f"reward.servers.{name}"
        yield from check_server(key, server)
        if name in (*BUILTIN_REWARDS, *RESERVED, BATCH, MODEL) or ":" in name or "." in name:
            message = f"{name!r} is not allowed: use a name without . and : that is not a built-in or metric"
            yield Problem((key,), message)
        if reward.manager == "model" and server.api != "sglang":
            yield Problem((f"{key}.api", "reward.manager"), "manager: model needs api: sglang")
        if reward.manager == "recipe" and name not in _named(reward):
            yield Problem((key, "reward.recipe"), "has no effect: no recipe uses it")


def _names(reward: RewardConfig) -> Iterator[Problem]:
    """Checks that every component is logged under a distinct name."""
    for label, mix in reward.recipe.items():
        if not mix:
            yield Problem(("reward.recipe",), f"{label!r} has no components")
    called = {(spec, _is_batch(reward, key)): key for key, spec in _functions(reward)}
    names = Counter([*RESERVED, *_beside(reward), *(spec.rpartition(":")[2] for spec, _ in called)])
    for (spec, _), key in called.items():
        if names[spec.rpartition(":")[2]] > 1:
            yield Problem((key,), f"{spec!r} would be logged under the name of another component or metric: rename it")
            return


def _beside(reward: RewardConfig) -> list[str]:
    """Returns the names of components that are not functions."""
    if reward.manager == "dapo":
        return ["overlong"] if "overlong" not in (spec for _, spec in _functions(reward)) else []
    return [name for name in (*reward.servers, MODEL) if reward.manager == "recipe" and name in _named(reward)]


def _sections(cfg: RLConfig) -> Iterator[Problem]:
    reward, limit = cfg.reward, cfg.rollout.sampling.max_new_tokens
    used = {spec for _, spec in _functions(reward)} | ({"overlong"} if reward.manager == "dapo" else set())
    for name in WITH_SECTION:
        if name not in used:
            yield from without_effect(reward, "reward", [name], f"the built-in {name} is not used", "reward.manager")
        elif dict(reward)[name] is None:
            yield Problem((f"reward.{name}", "reward.manager"), f"required by the built-in {name}")
    if "overlong" in used and reward.overlong is not None and reward.overlong.buffer_tokens > limit:
        message = f"{reward.overlong.buffer_tokens} is longer than a response of at most {limit} tokens"
        yield Problem(("reward.overlong.buffer_tokens", "rollout.sampling.max_new_tokens"), message)
    if "length" in used and reward.length is not None and reward.length.full_tokens == reward.length.zero_tokens:
        message = "must differ from zero_tokens: the score goes from 1 to 0 between them"
        yield Problem(("reward.length.full_tokens", "reward.length.zero_tokens"), message)
    if "code" in used and reward.code.wall_s + SANDBOX_START_S > reward.timeout_s:
        times = f"{reward.code.wall_s:g} s for the tests and up to {SANDBOX_START_S:g} s for the sandbox's start"
        message = f"{times} exceed the {reward.timeout_s:g} s of the function"
        yield Problem(("reward.code.wall_s", "reward.timeout_s"), message)
    if "format" in used:
        try:
            re.compile(reward.format.pattern)
        except re.error as error:
            yield Problem(("reward.format.pattern",), f"is not a regular expression: {error}")


def check_function(
    key: str, spec: str, takes: Sequence[str], built_in: bool = False, named: Sequence[str] = ()
) -> Iterator[Problem]:
    """Checks that `spec` is FILE:NAME of an existing function (or class) with the right parameters.

    Args:
        takes: names of the positional arguments
        built_in: the name of a built-in is allowed too
        named: names of the keyword arguments
    """
    path, _, name = spec.rpartition(":")
    if path and name:
        node = yield from definition(key, path, name)
        if node is not None and (problem := _call_problem(node, takes, named)):
            yield Problem((key,), f"{spec} {problem}")
    elif not built_in:
        yield Problem((key,), f"{spec!r} does not name a function in a file: expected path/to/file.py:name")
    elif spec.endswith(".py"):
        yield Problem((key,), f"{spec!r} is a file: name a function in it too, as in {spec}:NAME")
    elif spec not in BUILTIN_REWARDS:
        close = difflib.get_close_matches(spec, BUILTIN_REWARDS, n=1)
        hint = f"; did you mean {close[0]}?" if close else ""
        known = f"(known: {', '.join(BUILTIN_REWARDS)}, or path/to/file.py:name)"
        yield Problem((key,), f"unknown function {spec!r}{hint} {known}")


def definition(key: str, path: str, name: str) -> Generator[Problem, None, ast.stmt | None]:
    """Returns the statement that defines a name at the top level of a file, the last one if there are several, or
    yields why there is none. Parses the file without running it."""
    try:
        if problem := not_a_file(Path(path)):
            raise ValueError(problem)
        tree = ast.parse(Path(path).read_bytes(), path)
    except (OSError, SyntaxError, ValueError, RecursionError, MemoryError) as error:
        yield Problem((key,), f"cannot read {path}: {reason(error)}")
        return None
    found: dict[str, ast.stmt] = {}
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found[node.name] = node
        elif isinstance(node, ast.ImportFrom):
            found |= {alias.asname or alias.name: node for alias in node.names}
        elif isinstance(node, ast.Assign):
            found |= {target.id: node for target in node.targets if isinstance(target, ast.Name)}
    if name not in found:
        yield Problem((key,), f"{path} does not define {name!r}; it defines {', '.join(sorted(found)) or 'nothing'}")
    return found.get(name)


def _call_problem(node: ast.stmt, takes: Sequence[str], named: Sequence[str]) -> str | None:
    """Returns why the definition cannot be called with these arguments, as far as its source shows."""
    wanted = f"({', '.join([*takes, *(f'{name}=' for name in named)])})"
    if isinstance(node, ast.AsyncFunctionDef):
        return "is an async function, and mrl does not await it: define it with a plain def"
    if isinstance(node, ast.Assign) and isinstance(node.value, PLAIN_VALUES):
        return f"is a value, not a function: expected one that takes {wanted}"
    if not isinstance(node, ast.FunctionDef) or node.decorator_list:
        return None
    has, positional = node.args, [a.arg for a in (*node.args.posonlyargs, *node.args.args)]
    by_name = [a.arg for a in (*has.args, *has.kwonlyargs) if a.arg not in positional[: len(takes)]]
    required = positional[: len(positional) - len(has.defaults)]
    required += [a.arg for a, default in zip(has.kwonlyargs, has.kw_defaults) if default is None]
    missing = set(required) - set(positional[: len(takes)]) - set(named)
    fits = not missing and (has.vararg or len(takes) <= len(positional)) and (has.kwarg or set(named) <= set(by_name))
    only_named = [a.arg for a in has.kwonlyargs if named or a.arg in required]
    return None if fits else f"takes ({', '.join([*positional, *only_named])}), but mrl calls it with {wanted}"
