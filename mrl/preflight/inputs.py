"""Checks of rows, rewards and user functions for `mrl data` and `mrl train`; each check yields one finding a
mistake."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from mrl.algo import custom
from mrl.config.schema import AlgorithmConfig, Config, PreferenceDataConfig, SFTDataConfig, SourceConfig
from mrl.config.tokenizer_files import TOKENIZER
from mrl.data import DataError, TokenizerError, load_image_processor, load_tokenizer
from mrl.data.columns import named_columns, unused_column_notes
from mrl.data.encoder import Encoder
from mrl.data.first_rows import check_first_rows
from mrl.data.preference_rows import PreferenceReader
from mrl.data.rows import Reader, Row, RowCheck, RowReader, train_check
from mrl.data.sft_rows import SFTReader
from mrl.data.sources import open_rows, root_of
from mrl.data.turns import AssistantTurns
from mrl.options.estimators import CustomEstimator
from mrl.options.losses import CustomLoss
from mrl.preflight.finding import Finding
from mrl.reward.check import TrialRow, check_functions, check_hidden, row_check
from mrl.reward.errors import RewardError
from mrl.user_functions import FunctionError

TRIED_ROWS, TRIED_BYTES = 200, 1 << 20  # of each source, searched for a row for every function


def check_algorithm(cfg: Config) -> Iterator[Finding]:
    """Tries out the user's loss and estimator on a few tokens."""
    algorithm = cfg.algorithm_used()
    if algorithm is None:
        return
    try:
        check_user_functions(algorithm, has_values="critic" in cfg.models())
    except FunctionError as error:
        yield Finding("algorithm", "problem", str(error))
    else:
        yield Finding("algorithm", "ok", algorithm.adv_estimator)


def check_rewards(cfg: Config) -> Iterator[Finding]:
    """Loads the reward functions and scores one row with each user function."""
    rewards = cfg.rewards()
    if rewards is None:
        return
    sources = {f"data {source.path}": source.path for _, source, _ in _sources(cfg)}
    try:
        check_hidden(rewards, {"run.root": cfg.run.root, **sources})
        failed = check_functions(rewards, cfg.data, _trials(cfg))
    except RewardError as error:
        yield Finding("reward", "problem", str(error))
        return
    goes_on = {"zero": "scores 0", "leave_out": "is left out"}.get(rewards.on_error)
    then = f"; with reward.on_error: {rewards.on_error}, such a sample {goes_on}" if goes_on else ""
    for text in failed:
        yield Finding("reward", "warning" if goes_on else "problem", text + then)
    if not failed:
        yield Finding("reward", "ok", f"reward.manager {rewards.manager}: all functions load")


def check_data(cfg: Config) -> Iterator[Finding]:
    """Checks the first rows of long data; the run itself checks all rows alike before its first step.

    It loads the tokenizer only if a chat template formats the rows; otherwise the configuration check has read its
    files.
    """
    good, absent = [], dict[str, dict[str, str]]()
    for key, source, reader in _sources(cfg):
        columns = absent.setdefault(key, named_columns(reader.cfg))
        try:
            image_processor = load_image_processor(cfg.model.path, reader.cfg) if cfg.sees_pictures else None
            see = None if image_processor is None else partial(image_processor.grids, root=root_of(source))
            first = check_first_rows(source, reader, read_images=see)
        except DataError as error:
            yield Finding("data", "problem", str(error))
            columns.clear()
        else:
            for note in unused_column_notes(f"first rows of {source.path}", first.idle):
                yield Finding("data", "warning", note)
            for setting in first.named if first.are_all else [*columns]:
                columns.pop(setting, None)
            good.append((source, reader))
    for key, columns in absent.items():
        for setting, column in columns.items():
            message = f"{key}.{setting} has no effect: no row has {column!r}: name another column, or leave the key out"
            yield Finding("data", "problem", message)
    if good:
        yield Finding("data", "ok", f"the first rows are valid: {', '.join(source.path for source, _ in good)}")
    dressed = [(source, reader) for source, reader in good if reader.cfg.chat_template]
    if not dressed and (Path(cfg.model.path) / TOKENIZER).is_file():
        yield Finding("tokenizer", "ok", f"{cfg.model.path}: all token ids are within the model's vocabulary")
        return
    try:
        tokenizer = load_tokenizer(cfg.model.path, cfg.model.eos_token, cfg.model.chat_template)
        for source, reader in dressed:
            processor = load_image_processor(cfg.model.path, reader.cfg) if cfg.sees_pictures else None
            encoder = Encoder(reader.cfg, tokenizer, processor)
            render: Callable[[Row], object] = encoder.text
            if isinstance(reader, PreferenceReader):
                render = partial(reader.render, encoder=encoder)
            if isinstance(reader, SFTReader):
                render = partial(reader.render, turns=AssistantTurns(encoder, reader.cfg))
            check_first_rows(source, reader, render)
    except (DataError, TokenizerError) as error:
        yield Finding("tokenizer", "problem", str(error))
        return
    for note in tokenizer.turn_notes() if dressed else ():
        yield Finding("tokenizer", "warning", note)
    through = ", ".join(source.path for source, _ in dressed)
    said = f"; its chat template accepts the first rows of {through}" if through else ""
    yield Finding("tokenizer", "ok", f"{cfg.model.path} loads{said}")


def check_image_processors(cfg: Config) -> Iterator[Finding]:
    """Checks that all models with image input normalize images alike, since images are decoded once, by model.path's
    processor."""
    own = _normalisation(cfg, cfg.model.path)
    for name, use in cfg.models().items():
        theirs = None if use.path is None or own is None else _normalisation(cfg, use.path)
        wrong = sorted(key for key, value in (theirs or {}).items() if own is not None and value != own[key])
        if wrong:
            what = f"preprocessor_config.json differs from model.path's in {', '.join(wrong)}"
            why = "images are processed once, as model.path's processor says"
            yield Finding("data", "problem", f"{name}.path {use.path}: {what}, and {why}")


def _normalisation(cfg: Config, path: str) -> dict[str, Any] | None:
    """Image normalization of a model; None without image input, or if its processor cannot be loaded."""
    try:
        image_processor = load_image_processor(path, cfg.data) if cfg.sees_pictures else None
    except DataError:  # another check reports model.path's; other models need none
        return None
    return None if image_processor is None else image_processor.normalisation


def check_user_functions(algorithm: AlgorithmConfig, has_values: bool) -> None:
    """Loads the user's loss and estimator and tries them out on a few tokens."""
    if isinstance(loss := algorithm.policy_loss, CustomLoss):
        custom.load_custom_loss(loss.function, loss.options)
    if isinstance(algorithm, CustomEstimator):
        custom.load_custom_estimator(algorithm.advantage.function, algorithm.advantage.options, has_values)


def sampled_row_check(cfg: Config) -> RowCheck | None:
    """Returns the reward's check of a row; None if nothing is scored."""
    rewards = cfg.rewards()
    return row_check(rewards, cfg.data) if rewards is not None else None


def _sources(cfg: Config) -> Iterator[tuple[str, SourceConfig, Reader]]:
    """Yields the key of its section, each source, and the reader of its rows."""
    for key, use in cfg.data_uses().items():
        check = sampled_row_check(cfg) if use.is_sampled else None
        reader: Reader = RowReader(use.cfg, require_answer=not use.is_sampled, check=check)
        if isinstance(use.cfg, PreferenceDataConfig) and use.preferences is not None:
            reader = PreferenceReader(use.cfg, use.preferences, use.margins)
        if isinstance(use.cfg, SFTDataConfig):
            reader = SFTReader(use.cfg)
        yield from ((key, source, reader) for source in use.cfg.validation or ())
        if isinstance(reader, RowReader):
            reader = replace(reader, check=train_check(use, check))
        yield from ((key, source, reader) for source in use.cfg.train)


def _trials(cfg: Config) -> Iterator[TrialRow]:
    """Usable first rows of the sampled data."""
    for use in cfg.data_uses().values():
        if not use.is_sampled:
            continue
        reader, rewards = RowReader(use.cfg), cfg.rewards()
        image_processor = (
            load_image_processor(cfg.model.path, use.cfg) if rewards is not None and rewards.pictures else None
        )
        for source in use.cfg.train:
            try:
                rows = open_rows(source, TRIED_BYTES)
            except DataError:
                continue
            for i in range(min(len(rows), TRIED_ROWS)):
                with suppress(ValueError):
                    seen = None if image_processor is None else image_processor.pictures(rows[i], root_of(source))
                    pictures = None if seen is None else tuple(each.png for each in seen)
                    yield TrialRow(rows.where(i), reader.read(rows, i, source.name), pictures)
