"""Makes the weight sync of a run's engines."""

from __future__ import annotations

from collections.abc import Mapping

from mrl.config.engines import ENGINES
from mrl.learner import Learner
from mrl.trainers.rl.main_parts import MainParts, Ready
from mrl.weights.model.export import Exporter
from mrl.weights.sync.adapter import AdapterSource, AdapterSync
from mrl.weights.sync.engine_sync import EngineSync
from mrl.weights.sync.quantized import QuantizedSource
from mrl.weights.sync.weight_sync import WeightSync


def make_sync(main: MainParts, actors: Mapping[str, Learner], engines: Ready) -> EngineSync:
    """actors: the policies that are trained, by the name of their adapter; "" for the only one."""
    rollout, sync, actor = main.cfg.rollout, main.cfg.sync, next(iter(actors.values()))
    urls, access = engines.urls, engines.access
    guard = main.engine.check_sync if main.engine is not None else None
    if sync.lora == "adapter":
        assert actor.adapters is not None
        model = actor.bare, actor.arch, actor.mesh
        sources = {}
        for name, learner in actors.items():
            assert learner.adapters is not None
            learner.adapters.activate()
            sources[name] = AdapterSource(Exporter(*model, lora=learner.adapters.spec), learner.adapters.spec)
        return AdapterSync(sources, Exporter(*model), urls, sync, engines.tensor, access=access, guard=guard)
    return WeightSync(
        QuantizedSource(actor.exporter) if rollout.quantization == "fp8" else actor.exporter,
        urls,
        sync,
        engines.tensor,
        access=access,
        plain=ENGINES[rollout.engine].is_plain,
        guard=guard,
        nodes=main.nodes.nodes if main.nodes is not None else None,
        homes=main.nodes.all_homes(urls) if main.nodes is not None else None,
        apart=main.cfg.placement.is_apart,
    )
