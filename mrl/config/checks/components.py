"""Checks of the reward components that keys name, as far as components are known before scoring."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from mrl.config.builtin_rewards import BUILTIN_REWARDS, OF_AGENTS, OF_LENGTH, PARTS
from mrl.config.problems import Problem
from mrl.config.schema import RewardConfig, RLConfig
from mrl.options.estimators import GDPO

ANY, BATCH, MODEL, SCORE = "*", "batch", "model", "score"


@dataclass(frozen=True)
class RewardMix:
    """The components that score the rows of one data source.

    Attributes:
        names: known component names of a sample
        whole: components whose parts have unknown names
        is_open: any other name may exist too, because the parts of a single component have no prefix
    """

    names: tuple[str, ...]
    whole: tuple[str, ...] = ()
    is_open: bool = False

    def has(self, name: str) -> bool:
        return self.is_open or name in self.names or name.startswith(tuple(f"{component}/" for component in self.whole))


def check(cfg: RLConfig) -> Iterator[Problem]:
    """Checks that named components exist, and that groups are filtered by more than the length of their responses."""
    groups, key = cfg.algorithm.filter_groups, "algorithm.filter_groups.metric"
    if groups.enable:
        yield from _missing(cfg.reward, key, groups.metric)
        yield from _length(cfg, key)
    if isinstance(cfg.algorithm, GDPO):
        for name in cfg.algorithm.gdpo_reward_keys:
            yield from _missing(cfg.reward, "algorithm.gdpo_reward_keys", name)


def _missing(reward: RewardConfig, key: str, name: str) -> Iterator[Problem]:
    mixes = _mixes(reward)
    for label, mix in mixes.items():
        if not mix.has(name):
            whose = "the reward has" if len(mixes) == 1 else f"rows of the data source {label!r} have"
            message = f"{whose} no component {name!r}, only {', '.join(mix.names)}"
            yield Problem((key, "reward.manager"), message)
            return


def _length(cfg: RLConfig, key: str) -> Iterator[Problem]:
    """Checks a default metric: the score must not include the response length."""
    if "metric" in cfg.algorithm.filter_groups.model_fields_set:
        return
    for specs in _specs(cfg.reward).values():
        of_length = [spec for spec in specs if spec in OF_LENGTH]
        others = [_name(spec) for spec in specs if spec not in OF_LENGTH]
        if of_length and others:
            message = (
                f"must be given: the score includes {' and '.join(of_length)}, so a group of equal answers of "
                f"different lengths would be kept: set {' or '.join(others)}, or score if that is intended"
            )
            yield Problem((key, "reward.manager"), message)
            return


def _mixes(reward: RewardConfig) -> dict[str, RewardMix]:
    """Returns the mix of each data source."""
    specs = _specs(reward)
    if len({spec for each in specs.values() for spec in each}) == 1:
        ((spec, *_), *_) = specs.values()
        parts = _parts(reward, spec)
        return dict.fromkeys(specs, RewardMix((SCORE, *(parts or ())), is_open=parts is None))
    made = {}
    for label, each in specs.items():
        parts_of = {_name(spec): _parts(reward, spec) for spec in each}
        inner = [f"{name}/{part}" for name, parts in parts_of.items() for part in parts or ()]
        whole = tuple(name for name, parts in parts_of.items() if parts is None)
        made[label] = RewardMix((SCORE, *parts_of, *inner), whole)
    return made


def _specs(reward: RewardConfig) -> dict[str, list[str]]:
    """Returns, for each data source, the components that score its rows: functions, names of servers, `model`."""
    if reward.manager == "recipe":
        function = reward.function or BATCH
        return {label: [function if name == BATCH else name for name in mix] for label, mix in reward.recipe.items()}
    if reward.manager in ("remote", "model"):
        return {ANY: [*(reward.servers or (MODEL,))]}
    also = ["overlong"] if reward.manager == "dapo" else []
    everywhere = {} if reward.function is None else {ANY: reward.function}
    return {label: [spec, *also] for label, spec in (reward.functions | everywhere).items()}


def _parts(reward: RewardConfig, spec: str) -> tuple[str, ...] | None:
    """Returns the names of a component's parts besides the score; None if only the component knows them."""
    if spec in reward.servers:
        return () if reward.servers[spec].api == "sglang" else None
    if spec == MODEL:
        return ()
    return PARTS.get(spec, ()) if spec in BUILTIN_REWARDS and spec not in OF_AGENTS else None


def _name(spec: str) -> str:
    """Returns the name under which a component is logged."""
    return spec.rpartition(":")[2]
