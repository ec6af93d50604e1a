"""Makes the weight sync of a run's engines."""

from __future__ import annotations

from mrl.config.engines import ENGINES
from mrl.trainers.rl.main_parts import MainParts, Ready
from mrl.trainers.rl.models import Models
from mrl.weights.model.export import Exporter
from mrl.weights.sync.adapter import AdapterSync
from mrl.weights.sync.engine_sync import EngineSync
from mrl.weights.sync.quantized import QuantizedSource
from mrl.weights.sync.weight_sync import WeightSync


def make_sync(main: MainParts, models: Models, engines: Ready) -> EngineSync:
    rollout, sync, actor = main.cfg.rollout, main.cfg.sync, models.actor
    urls, access = engines.urls, engines.access
    guard = main.engine.check_sync if main.engine is not None else None
    if sync.lora == "adapter":
        assert actor.adapters is not None
        model, spec = (actor.bare, actor.arch, actor.mesh), actor.adapters.spec
        adapters, base = Exporter(*model, lora=spec), Exporter(*model)
        return AdapterSync(adapters, base, spec, urls, sync, engines.tensor, access=access, guard=guard)
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
