"""What `mrl data` shows and `mrl train` demands before it starts a process: rows and rewards that can be used."""

from __future__ import annotations

from collections.abc import Iterator

from mrl.algo import own
from mrl.config.derived import data_sections
from mrl.config.schema import Config, RLConfig, SourceConfig
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
    if isinstance(cfg, RLConfig):
        check_functions(cfg.reward)
        check_own(cfg)
        sources = {f"data {source.path}": source.path for source, _ in _sources(cfg)}
        check_hidden(cfg.reward, {"run.root": cfg.run.root, **sources})
    for source, reader in _sources(cfg):
        check_first(source, reader)
    dressed = [(source, reader) for source, reader in _sources(cfg) if reader.cfg.chat_template]
    if dressed:
        tokenizer = load_tokenizer(cfg.model.path, cfg.model.eos_token)
        for source, reader in dressed:
            check_first(source, reader, Encoder(reader.cfg, tokenizer).text)


def check_own(cfg: RLConfig) -> None:
    """Loads the user's own loss and estimator, and tries them out on a few tokens."""
    loss, algorithm = cfg.algorithm.policy_loss, cfg.algorithm
    if isinstance(loss, OwnLoss):
        own.load_loss(loss.function, loss.options)
    if isinstance(algorithm, OwnEstimator):
        own.load_estimator(algorithm.advantage.function, algorithm.advantage.options, cfg.critic is not None)


def check_of_sampled(cfg: Config) -> RowCheck | None:
    """What the reward demands of a row; None where nothing is sampled."""
    return row_check(cfg.reward, cfg.data) if isinstance(cfg, RLConfig) else None


def _sources(cfg: Config) -> Iterator[tuple[SourceConfig, RowReader]]:
    for key, data in data_sections(cfg).items():
        is_sampled = isinstance(cfg, RLConfig) and key == "data"
        reader = RowReader(data, require_answer=not is_sampled, check=check_of_sampled(cfg) if is_sampled else None)
        yield from ((source, reader) for source in (*data.train, *(data.validation or ())))
