"""Plan of rewards: the components that score each sample, with their weights. Every manager is such a table."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from mrl.reward.errors import RewardError

if TYPE_CHECKING:
    from mrl.config.schema import RewardConfig

ANY = "*"
BATCH = "batch"
MODEL = "model"
Mix = Mapping[str, float]  # component name -> weight


@dataclass(frozen=True)
class Component:
    """Scorer. `name`: name of its score in the logs; `spec`: the function's or the server's name."""

    name: str
    spec: str
    kind: Literal["function", "batch", "images", "server", "model"]
    where: str  # the key of the configuration


@dataclass(frozen=True)
class ScoringPlan:
    components: dict[str, Component]
    mixes: dict[str, Mix]  # by the row's data_source, `ANY` for those that are not named

    def of_kind(self, *kinds: str) -> list[Component]:
        return [component for component in self.components.values() if component.kind in kinds]

    def mix_of(self, row: Mapping[str, Any], key: str) -> Mix:
        """Returns the mix of the row's data source, under `key`. Raises RewardError for one that nothing scores."""
        data_source = row.get(key)
        found = self.mixes.get("" if data_source is None else str(data_source), self.mixes.get(ANY))
        if found is None:
            what = "has no data_source" if data_source is None else f"has the data_source {str(data_source)!r}"
            labels = ", ".join(map(repr, self.mixes))
            raise RewardError(f"{what}, but rewards are set for {labels} only (data.data_source_key: {key})")
        return found


def make_plan(cfg: RewardConfig) -> ScoringPlan:
    """Returns the plan of a checked configuration."""
    if cfg.manager == "recipe":
        mixes = cfg.recipe.items()
        made = {label: [(_component(key, cfg), weight) for key, weight in mix.items()] for label, mix in mixes}
    elif cfg.manager in ("remote", "model"):
        (scorer,) = cfg.servers or (MODEL,)
        made = {ANY: [(_component(scorer, cfg), 1.0)]}
    elif cfg.manager == "batch":
        made = {ANY: [(_component(BATCH, cfg), 1.0)]}
    else:
        also = [(_component("overlong", cfg), 1.0)] if cfg.manager == "dapo" else []
        made = {label: [(_function(f"functions.{label}", spec), 1.0), *also] for label, spec in cfg.functions.items()}
        if cfg.function is not None:
            made[ANY] = [(_function("function", cfg.function), 1.0), *also]
    components: dict[str, Component] = {}
    for component in (component for mix in made.values() for component, _ in mix):
        other = components.setdefault(component.name, component)
        assert (other.spec, other.kind) == (component.spec, component.kind), f"two components {component.name!r}"
    return ScoringPlan(components, {label: {c.name: weight for c, weight in mix} for label, mix in made.items()})


def component_name(spec: str) -> str:
    """Returns the name of a built-in or server, or the last part of `path/to/file.py:name`."""
    return spec.rpartition(":")[2]


def _component(key: str, cfg: RewardConfig) -> Component:
    """Returns the component that a recipe names."""
    if key in cfg.servers:
        return Component(key, key, "server", f"servers.{key}")
    if key == MODEL:
        return Component(MODEL, MODEL, "model", "model")
    if key == BATCH:
        assert cfg.function is not None
        return Component(component_name(cfg.function), cfg.function, "batch", "function")
    return _function("recipe", key)


def _function(where: str, spec: str) -> Component:
    return Component(component_name(spec), spec, "function", where)
