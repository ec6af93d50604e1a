"""Plan of a run: files for the plan's page and predicted seconds of each step."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from mrl import platform
from mrl.config.derived import Machine
from mrl.config.schema import Config
from mrl.core import Rollout, StepStats
from mrl.files import write_atomically
from mrl.observe import PLAN, RANKS, Recorder, SilentRecorder
from mrl.plan import picture, text
from mrl.plan.chips import CHIPS, Assumptions, Chip, Cluster, chip_named
from mrl.plan.forecast import Samples, forecast
from mrl.plan.placement import Placement
from mrl.plan.plan import Plan, make_plan, read_shapes
from mrl.plan.workload import models_of


class RunPlan:
    """Plan of a run on GPUs that the planner knows; exists on rank 0."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan

    @property
    def peak_flops(self) -> float:
        """Peak operations per second of one GPU in bfloat16."""
        return self._plan.cluster.chip.bf16

    def metrics(self, stats: StepStats, learnt: Rollout) -> dict[str, float]:
        """Predicted seconds of a step with these samples.

        Returns plan/PHASE_s for the phases in `stats`, plan/offload_s for all moves of memory, and plan/step_s in
        total. A model counts if `stats` has an update of it.
        """
        prompts, responses = learnt.prompt_lens, learnt.response_lens
        samples = Samples(
            learnt.num_samples,
            float(prompts.double().mean()),
            float(responses.double().mean()),
            int(prompts.max()),
            int(responses.max()),
        )
        updated = [name for name in self._plan.work.models if f"{name}/skipped" in stats.metrics]
        found = forecast(self._plan, samples, stats.seconds, updated)
        return {f"plan/{phase}_s": seconds for phase, seconds in {**found, "step": sum(found.values())}.items()}


def plan_run(cfg: Config, run_dir: Path, recorder: Recorder | SilentRecorder) -> RunPlan | None:
    """Writes RUN_DIR/plan.json and ranks.svg on rank 0, once the models are built.

    Returns None, with a note, if the planner does not know this hardware. A plan that fails leaves a note, and the run
    goes on.
    """
    try:
        machine, (chip, why) = Machine.from_environment(platform.gpu_count()), _chip(cfg)
        shapes = read_shapes(cfg)
        on_gpu, fused = bool(platform.gpu_names()), platform.transformer_engine_usable()
        models = models_of(cfg, shapes, machine.world_size, on_gpu, fused)
        places = Placement.of(cfg, {model.name: model for model in models}, machine)
        cluster = Cluster(chip, machine.world_size, machine.local_world_size) if chip is not None else None
        plan = make_plan(cfg, cluster, shapes, Assumptions(), fused=fused) if cluster is not None else None
        data = text.data(plan) if plan is not None else {"gpu": None, "why": why}
    except Exception as error:  # a run works without a plan
        recorder.note(f"no predicted step times: the plan failed: {type(error).__name__}: {error}")
        return None
    recorder.write_guarded("plan.json", lambda: _write(run_dir, data | places.data(), places))
    if plan is None:
        recorder.note(f"no MFU and no predicted step times: {why}")
        return None
    recorder.note(" ".join(filter(None, ("the plan:", text.bottleneck(plan), text.deadline_warning(plan)))))
    return RunPlan(plan)


def _chip(cfg: Config) -> tuple[Chip | None, str]:
    """The GPU of rank 0, or why there is no plan."""
    names = platform.gpu_names()
    if not names:
        return None, "both need a GPU"
    if cfg.model.dtype != "bfloat16":
        return None, f"both are based on bfloat16 peaks, and model.dtype is {cfg.model.dtype}"
    known = ", ".join(chip.device for chip in CHIPS.values())
    return chip_named(names[0]), f"the plan knows {known}, but not this GPU ({names[0]})"


def _write(run_dir: Path, data: dict[str, Any], places: Placement) -> None:
    write_atomically(run_dir / PLAN, json.dumps(data, indent=1) + "\n")
    write_atomically(run_dir / RANKS, picture.draw(places))
