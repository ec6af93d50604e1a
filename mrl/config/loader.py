"""Loads YAML (a file, its `base:` files, overrides) into a checked, frozen Config, or reports every mistake at once."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Sequence
from typing import Any

import yaml
from pydantic import ValidationError

from mrl.config.checks.all import check_all
from mrl.config.derived import Machine
from mrl.config.keys import keys_of, nearest_keys, walk
from mrl.config.problems import ConfigError, Problem
from mrl.config.sections.variants import TAG
from mrl.config.trainers.base import AnyConfig
from mrl.config.trainers.table import TRAINERS
from mrl.config.tree import Node, Source, describe, name_of, read
from mrl.config.yaml_dialect import Dumper
from mrl.options.base import Section
from mrl.redaction import redact_tree

_ALGORITHMS = {  # name of an algorithm -> section `algorithm`, for users who write the name alone
    "ppo": "{adv_estimator: gae}",
    "grpo": "{adv_estimator: grpo}",
    "dapo": "{adv_estimator: grpo, policy_loss: {clip_ratio_high: 0.28}, filter_groups: {enable: true}}",
    "dr_grpo": "{adv_estimator: grpo, norm_adv_by_std_in_grpo: false}",
    "gspo": "{adv_estimator: grpo, policy_loss: {loss_mode: gspo}}",
    "cispo": "{adv_estimator: grpo, policy_loss: {loss_mode: cispo}}",
}

MAX_ERRORS = 200  # errors reported; a file with more is not a configuration of mrl

_EXPECTED = {
    "int_type": "must be an integer",
    "int_from_float": "must be an integer",
    "int_parsing_size": "must be an integer of less than 64 bits",
    "float_type": "must be a number",
    "string_type": "must be a string",
    "bool_type": "must be true or false",
    "tuple_type": "must be a list",
    "dict_type": "must be a section (keys below it)",
    "model_type": "must be a section (keys below it)",
    "finite_number": "must be a finite number",
}


def load(
    source: Source,
    overrides: Sequence[str] = (),
    *,
    joined: Machine | None = None,
    gpus: int | None = None,
    planned: Callable[[AnyConfig], Machine] | None = None,
) -> AnyConfig:
    """Reads, validates and cross-checks a configuration: a file or a dict. Starts no process.

    Args:
        overrides: KEY=VALUE texts
        joined: world that this process is part of
        gpus: GPUs of this machine
        planned: returns the world to check for (`mrl plan`). Without `joined` and `planned`, the configuration is
            checked for the world that it would start on this machine.

    Raises:
        ConfigError: with every mistake found, each with its file, line and key
    """
    path = name_of(source)
    tree, problems = read(source, overrides)
    if tree is None:
        raise ConfigError(path, problems)
    schema = _schema(tree, path, problems)
    cfg, errors = _validate(schema, tree)
    if dropped := [error for error in errors if error["input"] is None and _owners(schema, error)]:
        for error in dropped:  # null removes a base file's key that belongs to another algorithm
            tree.drop(_as_written(schema, tree, _path(error)))
        cfg, errors = _validate(schema, tree)
    problems += [_foreign(schema, tree, error) or _problem(schema, tree, error) for error in errors[:MAX_ERRORS]]
    if cfg is None:
        for error in errors:
            tree.drop(_as_written(schema, tree, _path(error)))
        cfg, _ = _validate(schema, tree)
    if cfg is not None:
        found = check_all(cfg, joined or (planned(cfg) if planned is not None else Machine.for_launch(cfg, gpus)))
        unclear = [error for error in errors if not _owners(schema, error)]
        problems += [
            _placed(schema, tree, p) for p in found if not any(_tainted(key, e) for key in p.keys for e in unclear)
        ]
    if problems or cfg is None:
        raise ConfigError(path, problems)
    return cfg


def dump_resolved(cfg: AnyConfig) -> str:
    """Returns YAML with every key, which loads back to the same configuration except for passwords (***)."""
    return yaml.dump(dump_tree(cfg), Dumper=Dumper, sort_keys=False, allow_unicode=True, width=120)


def dump_tree(cfg: AnyConfig) -> dict[str, Any]:
    """Returns every key with its value, for JSON, with passwords as ***."""
    tree: dict[str, Any] = redact_tree(cfg.model_dump(mode="json"))
    return tree


def _schema(tree: Node, path: str, problems: list[Problem]) -> type[AnyConfig]:
    """Returns the class for the file's `trainer`; without a known trainer nothing else can be checked."""
    node, depth = tree.find(["trainer"])
    if depth == 0:
        message = f"required key is missing: one of {', '.join(TRAINERS)}"
    elif isinstance(node.value, str) and node.value in TRAINERS:
        return TRAINERS[node.value].schema
    else:
        section = _ALGORITHMS.get(str(node.value).lower())
        hint = f"; {node.value} is trainer: rl with algorithm: {section}" if section else ""
        message = f"must be one of {', '.join(TRAINERS)}, got {describe(node.value)}{hint}"
    raise ConfigError(path, [*problems, Problem(("trainer",), message, (node.place,))])


def _validate(schema: type[AnyConfig], tree: Node) -> tuple[AnyConfig | None, list[dict[str, Any]]]:
    """Returns the configuration, or pydantic's errors.

    A null section gets its defaults, so that a file can drop a section of its base file.
    """
    kinds = {name: field.annotation for name, field in schema.model_fields.items()}
    given = {
        name: value
        for name, value in tree.plain().items()
        if value is not None or not (isinstance(kind := kinds.get(name), type) and issubclass(kind, Section))
    }
    try:
        return schema.model_validate(given), []
    except ValidationError as error:
        return None, [dict(e) for e in error.errors(include_url=False)]


def _path(error: dict[str, Any]) -> list[str]:
    """Returns the keys down to the one in error, without list indices."""
    return [part for part in error["loc"] if isinstance(part, str) and not part.startswith(TAG)]


def _chosen(error: dict[str, Any]) -> list[str]:
    """Returns the values that select the variants of the sections on the way to the error."""
    return [part.removeprefix(TAG) for part in error["loc"] if isinstance(part, str) and part.startswith(TAG)]


def _owners(schema: type[AnyConfig], error: dict[str, Any]) -> list[str]:
    """Returns the variants of a section that have the unknown key, if it belongs to other variants."""
    path = ".".join(_path(error))
    unknown = error["type"] == "extra_forbidden"
    return [key.only_with[1] for key in walk(keys_of(schema)) if unknown and key.path == path and key.only_with]


def _foreign(schema: type[AnyConfig], tree: Node, error: dict[str, Any]) -> Problem | None:
    """Returns the problem for a key that belongs to another algorithm, else None."""
    owners = _owners(schema, error)
    if not owners:
        return None
    path, section = ".".join(_path(error)), ".".join(_path(error)[:-1])
    kind = next(key.kinds[0] for key in walk(keys_of(schema)) if key.path == section)
    what = f"has no effect: the {kind.noun} is {_chosen(error)[-1]}, and this is a key of {', '.join(owners)}"
    message = f"{what}; remove the key, or override it with null"
    return _placed(schema, tree, Problem((path, f"{section}.{kind.by}"), message))


def _tainted(key: str, error: dict[str, Any]) -> bool:
    """True if the error makes this key unreliable, so that cross-checks would only report the same mistake again.

    This holds for keys beside and below the mistake; at the top level only for keys below it. An unknown section may be
    a misspelling of any section beside it, so all keys of those sections count as unreliable.
    """
    *parents, _ = path = _path(error)
    around, wrong = ".".join(parents), ".".join(path)
    if error["type"] == "extra_forbidden" and isinstance(error["input"], dict):
        return f"{key}.".startswith(f"{around}.") or not around
    beside = bool(around) and around in (key, key.rpartition(".")[0])
    return beside or f"{key}.".startswith(f"{wrong}.")


def _problem(schema: type[AnyConfig], tree: Node, error: dict[str, Any]) -> Problem:
    path, kind, value = _path(error), error["type"], error["input"]
    if kind == "extra_forbidden":
        message = _unknown(schema, path, _chosen(error))
    elif kind == "missing":
        message = "required key is missing"
    elif kind == "literal_error":
        choices = [choice.strip("' ") for choice in error["ctx"]["expected"].replace(" or ", ", ").split(", ")]
        close = difflib.get_close_matches(str(value), choices, n=1, cutoff=0.5)
        hint = f"; did you mean {close[0]}?" if close else ""
        if path[-1] == "adv_estimator" and (section := _ALGORITHMS.get(str(value).lower())):
            hint = f"; {value} is algorithm: {section}"
        message = f"must be one of {', '.join(choices)}, got {describe(value)}{hint}"
    else:
        expected = _EXPECTED.get(kind) or error["msg"].removeprefix("Value error, ").replace(
            "Input should be", "must be"
        )
        of_a_list = "every item " if any(isinstance(part, int) for part in error["loc"]) else ""
        of_its_keys = kind == "value_error" and isinstance(value, dict)
        message = f"{of_a_list}{expected}" + ("" if of_its_keys else f", got {describe(value)}")
    written = _as_written(schema, tree, path)
    return Problem((".".join(written),), message, (tree.find(written)[0].place,))


def _unknown(schema: type[AnyConfig], path: Sequence[str], chosen: Sequence[str]) -> str:
    """Returns what to write instead of an unknown key: a former one, one of other trainers, or a misspelled one."""
    section = next((key.section for key in walk(keys_of(schema)) if key.path == ".".join(path[:-1])), None)
    if section is not None and issubclass(section, Section) and (instead := section.gone.get(path[-1])):
        return f"is no key any more: {instead}"
    schemas: dict[str, type[AnyConfig]] = {name: trainer.schema for name, trainer in TRAINERS.items()}
    has = {name for name, of in schemas.items() if any(key.path == ".".join(path) for key in walk(keys_of(of)))}
    if has:
        here = ", ".join(name for name, of in schemas.items() if of is schema)
        return f"unknown key; it is a key of trainer {', '.join(sorted(has))}, and this is trainer {here}"
    beside, meant = nearest_keys(keys_of(schema), path, chosen)
    if not meant:
        return f"unknown key; this section has {', '.join(key.name for key in beside)}"
    names = []
    for key in meant[:3]:
        owners = [same.only_with[1] for same in walk(keys_of(schema)) if same.path == key.path and same.only_with]
        elsewhere = f"{key.path} (a key of {', '.join(owners)})" if owners else key.path
        names.append(key.name if key in beside else elsewhere)
    return f"unknown key; did you mean {' or '.join(names)}?"


def _as_written(schema: type[AnyConfig], tree: Node, path: list[str]) -> list[str]:
    """Returns the path with the key's former name, if the file uses that name."""
    if tree.find(path)[1] == len(path):
        return path
    former = [key.former.split(".") for key in walk(keys_of(schema)) if key.path == ".".join(path) and key.former]
    return next((old for old in former if tree.find(old)[1] == len(old)), path)


def _placed(schema: type[AnyConfig], tree: Node, problem: Problem) -> Problem:
    paths = [_as_written(schema, tree, key.split(".")) for key in problem.keys]
    keys, found = tuple(".".join(path) for path in paths), [tree.find(path) for path in paths]
    unwritten = {key for key, path, (_, depth) in zip(keys, paths, found, strict=True) if depth < len(path)}
    return Problem(keys, problem.message, tuple(node.place for node, _ in found), frozenset(unwritten))
