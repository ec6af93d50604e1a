"""What `mrl data` shows and `mrl train` demands before it starts a process: rows and rewards that can be used."""

from __future__ import annotations

from collections.abc import Iterator

from mrl.algo import own
from mrl.config.schema import AlgorithmConfig, Config, SourceConfig
from mrl.data import load_tokenizer
from mrl.data.encoder import Encoder
from mrl.data.rows import RowCheck, RowReader, check_first
from mrl.options.estimators import OwnEstimator
from mrl.options.losses import OwnLoss
from mrl.reward.check import check_functions, check_hidden, row_check


def check(cfg: Config) -> None:
    """Raises DataError, TokenizerError, RewardError or FunctionError, one line a mistake.

    Of long data the first rows only: the run reads them all, with the same demands, before its first step.
    """
    if (algorithm := cfg.algorithm_used()) is not None:
        check_own(algorithm, has_values="critic" in cfg.models())
    if (rewards := cfg.rewards()) is not None:
        check_functions(rewards)
        sources = {f"data {source.path}": source.path for source, _ in _sources(cfg)}
        check_hidden(rewards, {"run.root": cfg.run.root, **sources})
    for source, reader in _sources(cfg):
        check_first(source, reader)
    dressed = [(source, reader) for source, reader in _sources(cfg) if reader.cfg.chat_template]
    if dressed:
        tokenizer = load_tokenizer(cfg.model.path, cfg.model.eos_token)
        for source, reader in dressed:
            check_first(source, reader, Encoder(reader.cfg, tokenizer).text)


def check_own(algorithm: AlgorithmConfig, has_values: bool) -> None:
    """Loads the user's own loss and estimator, and tries them out on a few tokens."""
    if isinstance(loss := algorithm.policy_loss, OwnLoss):
        own.load_loss(loss.function, loss.options)
    if isinstance(algorithm, OwnEstimator):
        own.load_estimator(algorithm.advantage.function, algorithm.advantage.options, has_values)


def check_of_sampled(cfg: Config) -> RowCheck | None:
    """What the reward demands of a row; None where nothing is scored."""
    rewards = cfg.rewards()
    return row_check(rewards, cfg.data) if rewards is not None else None


def _sources(cfg: Config) -> Iterator[tuple[SourceConfig, RowReader]]:
    for use in cfg.data_uses().values():
        check = check_of_sampled(cfg) if use.is_sampled else None
        reader = RowReader(use.cfg, require_answer=not use.is_sampled, check=check)
        yield from ((source, reader) for source in (*use.cfg.train, *(use.cfg.validation or ())))
