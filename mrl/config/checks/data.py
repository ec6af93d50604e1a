"""Checks that data sources exist and have the columns that the data section names.

Reads first rows and schemas only; mrl.data checks every row when it reads it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from itertools import islice, product
from pathlib import Path
from typing import Any

from mrl.config import reasoning_tasks, verifiers_environments
from mrl.config.checks.base import Archs, changed, check_positions, without_effect
from mrl.config.json_rows import BOM, as_row, parse_row
from mrl.config.problems import Problem, not_a_file, reason
from mrl.config.sections.data import PreferenceDataConfig, SFTDataConfig, SourceConfig
from mrl.config.trainers.base import AnyConfig, Config, DataUse
from mrl.families import ModelArch
from mrl.foreign import read_json
from mrl.strict_json import raw_decode

HEAD_BYTES = 1 << 20
KINDS = "expected FILE.jsonl, FILE.json, FILE.parquet, a directory, reasoning_gym:TASK or verifiers:NAME"
SUFFIXES = (".parquet", ".arrow", ".jsonl", ".json", ".csv", ".tsv", ".txt", ".gz", ".zst", ".zip", ".tar", ".xml")
LOOKED_AT = 10_000  # maximum number of files of a directory that are listed
Columns = dict[str, type | None]  # column -> type; None: other types, and types that the schema does not tell


class Unreadable(ValueError):
    """A source that cannot be used; the message says why."""


def check_sources(cfg: AnyConfig) -> Iterator[Problem]:
    for key, use in cfg.data_uses().items():
        data = use.cfg
        yield from _sources(key, "train", data.train, use)
        if isinstance(data, PreferenceDataConfig):
            yield from _forms(key, data, use)
        for name in changed(data, "system_key", "tools_key", "chat_template_kwargs_key"):
            if dict(data)[name] is not None and not data.chat_template:  # null is allowed
                yield Problem((f"{key}.{name}", f"{key}.chat_template"), "has no effect: chat_template is false")
        yield from check_weights(f"{key}.train", data.train)
        if not (use.is_sampled or use.is_evaluated):
            other, because = key.rpartition(".")[0] or "trainer", "demonstrations have no rewards or metrics by source"
            yield from without_effect(data, key, ["data_source_key"], because, other)
            for source in data.train:
                if source.name is not None:
                    message = f"the name {source.name!r} of {source.path} has no effect: {because}"
                    yield Problem((f"{key}.train", other), message)
        if data.validation is not None and (use.is_sampled or use.is_evaluated):
            yield from _sources(key, "validation", data.validation, use)
            if any(source.weight is not None for source in data.validation):
                message = "weights have no effect: validation takes the first rows of all sources in turn"
                other = "validation.prompts" if use.is_sampled else "validation.rows"
                yield Problem(("data.validation", other), message)
            yield from _shared_problems(key, data.train, data.validation)
        elif data.validation is not None:
            other = key.rpartition(".")[0] or "trainer"
            yield Problem((f"{key}.validation", other), "has no effect: only data of generated responses is validated")


def _sources(section: str, name: str, sources: tuple[SourceConfig, ...], use: DataUse) -> Iterator[Problem]:
    key = f"{section}.{name}"
    yield from check_names(key, sources)
    for source in sources:
        try:
            columns = read_columns(source)
        except Unreadable as error:
            yield Problem((key,), str(error))
        else:
            yield from _columns(section, key, source, columns, use) if columns is not None else ()


def _forms(key: str, data: PreferenceDataConfig, use: DataUse) -> Iterator[Problem]:
    """Checks for columns of another form of rows than those that the sources have, by their first rows."""
    try:
        found = [read_columns(source) for source in (*data.train, *(data.validation or ()))]
    except Unreadable:  # `_sources` reports it
        return
    known = [columns for columns in found if columns is not None]
    if not known or len(known) < len(found):
        return
    are_pairs = [all(_has(columns, name) for name in (data.chosen_key, data.rejected_key)) for columns in known]
    are_lists = [_has(columns, data.completions_key) for columns in known]
    others: dict[str, list[str]] = {}  # what the rows have or lack -> keys that this makes ineffective
    if use.preferences in ("pairs", "lists"):
        if not any(are_lists):
            others[f"the rows have no {data.completions_key!r}"] = ["completions_key", "ranked_pairs"]
        elif all(are_lists):
            others[f"the rows have {data.completions_key!r}"] = ["chosen_key", "rejected_key"]
    elif use.preferences == "labels":
        if all(are_pairs):
            others[f"the rows have {data.chosen_key!r}"] = ["completion_key", "label_key"]
        elif not any(are_pairs):
            others[f"the rows have {data.completion_key!r}"] = ["chosen_key", "rejected_key"]
    for because, names in others.items():
        yield from without_effect(data, key, names, because, f"{key}.train")


def _has(columns: Columns, name: str) -> bool:
    return name in columns or name.split(".")[0] in columns


def check_names(key: str, sources: tuple[SourceConfig, ...]) -> Iterator[Problem]:
    """Checks that there are sources, and each only once."""
    if not sources:
        yield Problem((key,), "has no sources: name at least one")
    if len({(source.path, source.split) for source in sources}) < len(sources):
        yield Problem((key,), "names a source twice: give it a larger weight instead")


def check_weights(key: str, sources: tuple[SourceConfig, ...]) -> Iterator[Problem]:
    """Checks that all training sources have a weight or none has, and that weights have an effect."""
    without = [source.path for source in sources if source.weight is None]
    if len(sources) == 1 and not without:
        yield Problem((key,), f"the weight of {sources[0].path} has no effect: it is the only source")
    elif 0 < len(without) < len(sources):
        yield Problem((key,), f"{', '.join(without)} without weight: give a weight to every source or to none")


def _shared_problems(
    key: str, train: tuple[SourceConfig, ...], validation: tuple[SourceConfig, ...]
) -> Iterator[Problem]:
    """Checks that no problem of reasoning-gym is both trained on and held out."""
    for one, other in product(train, validation):
        with suppress(ValueError):  # of a source that is a problem by itself
            if reasoning_tasks.share_problems(one.path, other.path):
                message = f"shares problems with {one.path}: let its seed begin at the seed + size of that source"
                yield Problem((f"{key}.validation",), message)


def _columns(section: str, key: str, source: SourceConfig, columns: Columns, use: DataUse) -> Iterator[Problem]:
    data = use.cfg
    where, has = f"the first row of {source.path}", ", ".join(columns) or "no keys"
    needed = use.needed(columns).items()
    missing = {setting: name for setting, name in needed if not _has(columns, name)}
    if missing and isinstance(data, SFTDataConfig) and (form := _other_form(data, columns)):
        lacks = " and ".join(map(repr, missing.values()))
        yield Problem((f"{section}.form", key), f"{data.form} needs {lacks}, and {where} has {has}: set it to {form}")
    else:
        for setting, name in missing.items():
            yield Problem((f"{section}.{setting}", key), f"{where} has no {name!r}; it has {has}")
    if use.reads_prompts and columns.get(data.prompt_key) is list and not data.chat_template:
        message = f"false needs text prompts, and {where} has a list of messages in {data.prompt_key!r}: set it to true"
        yield Problem((f"{section}.chat_template", key), message)
    if source.name is not None and data.data_source_key in columns:
        message = f"the name {source.name!r} of {source.path} has no effect: its rows have {data.data_source_key!r}"
        yield Problem((key, f"{section}.data_source_key"), message)


def _other_form(data: SFTDataConfig, columns: Columns) -> str | None:
    """Returns the form of rows with these columns, if it is another one than the configured."""
    found = {"messages": data.messages_key, "text": data.text_key}
    return next((form for form, name in found.items() if form != data.form and name in columns), None)


def read_columns(source: SourceConfig) -> Columns | None:
    """Returns the keys of the first row and the types of their values; None if only the whole data can tell.

    Raises Unreadable.
    """
    try:
        return _read_columns(source)
    except Unreadable:
        raise
    except FileNotFoundError:
        raise Unreadable(f"{source.path!r} is not on this machine: {KINDS} (mrl downloads nothing)") from None
    except (OSError, ValueError) as error:
        raise Unreadable(f"cannot read {source.path}: {reason(error)}") from error


def _read_columns(source: SourceConfig) -> Columns | None:
    path = Path(source.path)
    if not source.path:
        raise FileNotFoundError
    if reasoning_tasks.is_task(source.path):
        if source.split is not None:
            raise Unreadable(f"split {source.split!r} has no effect: {path} has no splits")
        return dict(reasoning_tasks.columns(source.path))
    if verifiers_environments.is_environment(source.path):
        if source.split is not None and source.split not in (splits := verifiers_environments.SPLITS):
            raise Unreadable(f"{path} has no split {source.split!r}; it has {', '.join(splits)}")
        if problem := verifiers_environments.name_problem(source.path):
            raise Unreadable(f"cannot use {path}: {problem}")
        return None
    if path.is_dir():
        return _columns_of_directory(path, source.split)
    if problem := not_a_file(path):
        raise Unreadable(f"cannot read {path}: {problem}")
    if path.suffix not in (".jsonl", ".json", ".parquet"):
        raise Unreadable(f"{path} is not in a format that mrl reads: {KINDS}")
    if source.split is not None:
        raise Unreadable(f"split {source.split!r} has no effect: {path} is one file")
    if path.suffix == ".parquet":
        return _columns_of_parquet(path)
    return _columns_of_json(path)


def _columns_of_json(path: Path) -> Columns | None:
    """Reads the first line, or the first item of a list."""
    with path.open("rb") as file:
        head = file.read(HEAD_BYTES).removeprefix(BOM).lstrip()
    as_list = path.suffix == ".json" and head.startswith(b"[")
    if not head or (as_list and head[1:].lstrip().startswith(b"]")):
        raise Unreadable(f"{path} has no rows")
    line, end, _ = head.partition(b"\n")
    if len(head) > HEAD_BYTES // 2 and (as_list or not end):
        return None  # the first row is longer than the part that was read
    try:
        row = _first_item(head) if as_list else parse_row(line)
    except ValueError as error:
        what = "first item" if as_list else "first line"
        expected = f"expected one row per {'item' if as_list else 'line'}"
        raise Unreadable(f"the {what} of {path} is not a JSON object: {expected} ({error})") from error
    return {name: type(value) for name, value in row.items()}


def _first_item(head: bytes) -> dict[str, Any]:
    try:
        return as_row(raw_decode(head[1:].decode("utf-8", errors="ignore").lstrip(), 0)[0])
    except RecursionError as error:
        raise ValueError("nested too deeply") from error


def _columns_of_parquet(path: Path) -> Columns:
    import pyarrow
    from pyarrow import parquet

    try:
        metadata = parquet.read_metadata(path)
        schema = metadata.schema.to_arrow_schema()
    except (pyarrow.ArrowException, OSError) as error:
        raise Unreadable(f"{path} is not a Parquet file: {str(error).partition(chr(10))[0]}") from error
    if metadata.num_rows == 0:
        raise Unreadable(f"{path} has no rows")
    types = pyarrow.types

    def kind(of: Any) -> type | None:
        if types.is_string(of) or types.is_large_string(of):
            return str
        return list if types.is_list(of) or types.is_large_list(of) else None

    return {field.name: kind(field.type) for field in schema}


def _columns_of_directory(path: Path, split: str | None) -> Columns | None:
    """Reads the columns of a directory written by `save_to_disk`; None for directories that only `datasets`
    understands."""
    try:
        if (path / "dataset_dict.json").is_file():
            path = path / _split(path, read_json(path / "dataset_dict.json")["splits"], split)
        elif (path / "state.json").is_file() and split is not None:
            raise Unreadable(f"split {split!r} has no effect: {path} has no splits")
        info = path / "dataset_info.json"
        features = read_json(info).get("features") if info.is_file() else None
        columns = {name: _feature(feature) for name, feature in features.items()} if features else None
    except Unreadable:
        raise
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise Unreadable(f"{path} is not a directory saved by the datasets library: {error!r}") from error
    if columns is None and not any(file.suffix in SUFFIXES for file in islice(path.rglob("*"), LOOKED_AT)):
        raise Unreadable(f"{path} is a directory without data files: {KINDS} of such files")
    return columns


def _split(path: Path, names: list[str], split: str | None) -> str:
    if split is None and len(names) > 1:
        raise Unreadable(f"{path} has the splits {', '.join(names)}: choose one with split")
    if split is not None and split not in names:
        raise Unreadable(f"{path} has no split {split!r}; it has {', '.join(names)}")
    return split or names[0]


def _feature(feature: Any) -> type | None:
    if isinstance(feature, list) or feature.get("_type") in ("List", "LargeList", "Sequence"):
        return list
    return str if feature.get("dtype") in ("string", "large_string") else None


def check_preferences(data: PreferenceDataConfig, arch: ModelArch | None) -> Iterator[Problem]:
    """Checks that responses have room beside their prompts, and that the model has positions for both."""
    if data.max_prompt_tokens >= data.max_tokens:
        message = f"{data.max_prompt_tokens} prompt tokens leave no room for a response in {data.max_tokens} tokens"
        yield Problem(("data.max_prompt_tokens", "data.max_tokens"), message)
    yield from check_positions("data.max_tokens", data.max_tokens, arch)


def check_answers(cfg: Config, archs: Archs) -> Iterator[Problem]:
    """Checks that answers to train on have room beside their prompts."""
    if (arch := archs["actor"]) is None:
        return
    for key, use in cfg.data_uses().items():
        prompt, positions = use.cfg.max_prompt_tokens, arch.max_positions
        if use.reads_prompts and not use.is_sampled and prompt >= positions:
            message = f"{prompt} prompt tokens leave no room for answers in the model's {positions} positions"
            yield Problem((f"{key}.max_prompt_tokens", "model.path"), message)


def check_held_out(cfg: Config) -> Iterator[Problem]:
    """Checks a trainer that validates on held-out rows."""
    validation = cfg.held_out()
    assert validation is not None
    if cfg.data.validation is None:
        names = list(type(validation).model_fields)
        yield from without_effect(validation, "validation", names, "there are no held-out rows", "data.validation")
        return
    if validation.keep_best and cfg.checkpoint.every_steps is None:
        message = "no checkpoints are written: set checkpoint.every_steps to keep the best one"
        yield Problem(("validation.keep_best", "checkpoint.every_steps"), message)
    if not validation.keep_best and validation.patience is None:
        because = "neither keep_best nor patience uses it"
        yield from without_effect(validation, "validation", ["metric", "min_delta"], because, "validation.patience")
