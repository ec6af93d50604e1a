"""Run under torchrun: routing replay (experts that are recorded and given to the routers) under many layouts.

Usage: routing.py MODEL_DIR REFERENCE_FILE RESULT_JSON LAYOUT [LAYOUT ...], layouts as in gradients.py. `one`, in a
world of one process, writes the reference file, and to RESULT_JSON the checks that need one rank only. The others write
{layout: {"noted": share of choices that differ, "changed": difference of that share, "log_probs": greatest difference,
"loss", "gradient": relative errors, "shares": [bytes of experts that a rank had in the last pass, tokens without
padding times their layers] of each rank, "all": both for the whole rollout, "terms": [losses of three rollouts one by
one, loss of one update of all]}}.
"""

from __future__ import annotations

import gc
import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from mrl import platform

platform.install()

from gradients import (  # noqa: E402
    compare,
    gradients,
    make_rollout,
    make_several,
    make_trajectories,
    parse,
    plain_gradient,
)

from mrl.config.schema import TrainConfig  # noqa: E402
from mrl.core import Rollout  # noqa: E402
from mrl.families import load_arch  # noqa: E402
from mrl.learner import Learner  # noqa: E402
from mrl.learner.loss_terms import LossTerm  # noqa: E402
from mrl.models.mcore import TopKRouter  # noqa: E402
from mrl.models.routing import RecordingRouterReplay  # noqa: E402
from mrl.parallel import Meshes, rank  # noqa: E402

TIMEOUT_S = 600
KEPT = 2  # every token is sent to these experts, so the router's rows of the other experts must not matter


def learner_of(model: str, meshes: Meshes, layout: str, *, replays: bool = True) -> Learner:
    name, _, recompute = layout.partition("/")
    mesh = meshes.get(parse(name))
    train = TrainConfig(parallel=mesh.cfg, max_tokens_per_microbatch=40, recompute=recompute or "none")  # type: ignore[arg-type]
    fixed: dict[str, Any] = {"dtype": torch.float32, "seed": 3, "from_scratch": True, "replays": replays}
    return Learner("policy", load_arch(model), model, train, mesh, **fixed)


def recorded(learner: Learner, rollout: Rollout) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the log-probs, and the experts that the routers chose."""
    assert learner.replay is not None
    with learner.replay.recording():
        log_probs, _ = learner.log_probs(rollout, 0.7)
    return log_probs, learner.replay.recorded(rollout)


def others(own: torch.Tensor, count: int) -> torch.Tensor:
    """Returns the experts with those of a third of the tokens replaced by random ones, as an engine might."""
    g = torch.Generator().manual_seed(5)
    random = torch.rand(*own.shape[:2], count, generator=g).argsort(-1)[..., : own.size(-1)].to(own.dtype)
    return torch.where(torch.rand(len(own), 1, 1, generator=g) < 1 / 3, random, own)


def differ(a: torch.Tensor, b: torch.Tensor) -> float:
    """Returns the share of the choices in `a` that are not in `b`, in any order."""
    return float((a[..., :, None] != b[..., None, :]).all(-1).float().mean())


def passes(learner: Learner, rollout: Rollout, given: torch.Tensor | None = None) -> dict[str, Any]:
    assert learner.replay is not None and learner.arch.experts is not None
    free, own = recorded(learner, rollout)
    experts = others(own if given is None else given, learner.arch.experts.count)
    told = replace(rollout, routed_experts=experts if rank() == 0 else experts[:, :0])
    apart, at_once = terms(learner, told, rollout, replace(told, routed_experts=first_experts(told)))
    learner.replay.take_changed_share()
    share = watched(learner)
    log_probs, _ = learner.log_probs(told, 0.7)
    changed = learner.replay.take_changed_share()
    result = gradients(learner, told, plain_gradient(told), False)
    assert learner.replay.take_changed_share() == changed  # the weights have not changed
    found = {"free": free, "own": own, "log_probs": log_probs, "changed": changed, "gradients": result}
    whole = len(rollout.tokens) * experts.size(1)
    return found | {
        "terms": [apart, at_once],
        "share": share[0],
        "all": [whole * experts.size(-1) * experts.itemsize, whole],
    }


def first_experts(told: Rollout) -> torch.Tensor:
    """Returns experts that send every token to the first ones."""
    assert told.routed_experts is not None
    chosen = torch.arange(told.routed_experts.size(-1), dtype=told.routed_experts.dtype)
    return chosen.expand_as(told.routed_experts).contiguous()


def terms(learner: Learner, *rollouts: Rollout) -> tuple[list[float], float]:
    """Returns the losses of separate updates of the rollouts, and of one update of all of them."""
    loss, samples = plain_gradient(rollouts[0]), range(rollouts[0].num_samples)
    apart = [gradients(learner, each, loss, False)[0] for each in rollouts]
    also = [LossTerm(each, samples, loss, 0.7) for each in rollouts[1:]]
    return apart, learner.backward(rollouts[0], samples, loss, 0.7, also=also)["loss"]


def watched(learner: Learner) -> list[list[int]]:
    """Returns a list that gets [bytes of experts on this rank, tokens without padding times layers] at each pass."""
    replay, found = learner.replay, []
    assert replay is not None
    begin = replay.begin

    def watch(batches: Any, rollouts: Any) -> Any:
        placed = begin(batches, rollouts)
        assert replay.share is not None
        tokens = sum(int((batch.packed.source >= 0).sum()) for batch in batches)
        found.append([replay.share.nbytes, tokens * replay.share.size(1) if len(replay.share) else 0])
        return placed

    replay.begin = watch  # type: ignore[method-assign]
    return found


def routers(learner: Learner) -> list[TopKRouter]:
    return [module for chunk in learner.bare for module in chunk.modules() if isinstance(module, TopKRouter)]


def by_itself(model: str, meshes: Meshes, found: dict[str, Any], rollout: Rollout) -> dict[str, Any]:
    learner, plain = learner_of(model, meshes, "one"), learner_of(model, meshes, "one", replays=False)
    assert learner.replay is not None and learner.arch.experts is not None
    own = found["own"]
    plain.planner.shares = False  # as with routing replay
    out: dict[str, Any] = {"off": float((plain.log_probs(rollout, 0.7)[0] - found["free"]).abs().max())}
    again, _ = learner.log_probs(replace(rollout, routed_experts=own), 0.7)
    out["own experts"] = float((again - found["free"]).abs().max())
    out["changed by own experts"] = learner.replay.take_changed_share()
    out["others change"] = float((found["log_probs"] - found["free"]).abs().max())
    told = make_several(make_trajectories(rollout))
    several, own = recorded(learner, told)
    again, _ = learner.log_probs(replace(told, routed_experts=own), 0.7)
    out["sequences: own experts"] = float((again - several).abs().max())
    again, _ = learner.log_probs(replace(told, routed_experts=others(own, learner.arch.experts.count)), 0.7)
    out["sequences: others change"] = float((again - several).abs().max())
    learner.replay.take_changed_share()
    assert told.sequence_lens is not None
    own[told.sequence_lens.cumsum(0) - 1] = 0  # as an engine reports a last token, which it never feeds to the model
    gradients(learner, replace(told, routed_experts=own), plain_gradient(told), False)
    out["sequences: changed in an update"] = learner.replay.take_changed_share()
    own = found["own"]
    kept = replace(rollout, routed_experts=torch.arange(KEPT, dtype=own.dtype).expand_as(own).contiguous())
    before, _ = learner.log_probs(kept, 0.7)
    learner.replay.take_changed_share()
    with torch.no_grad():
        for router in routers(learner):
            router.weight[KEPT:] += 0.5 * torch.randn(
                router.weight[KEPT:].shape, generator=torch.Generator().manual_seed(1)
            )
    out["router moved: chosen otherwise"] = differ(own, recorded(learner, rollout)[1])
    out["router moved: log-probs, free"] = float((learner.log_probs(rollout, 0.7)[0] - found["free"]).abs().max())
    out["router moved: log-probs, replayed"] = float((learner.log_probs(kept, 0.7)[0] - before).abs().max())
    out["router moved: changed"] = learner.replay.take_changed_share()
    gradients(learner, kept, plain_gradient(kept), False)
    weights = [router.weight.main_grad for router in routers(learner)]
    out["gradient of the chosen"] = min(float(w[:KEPT].norm()) for w in weights)
    out["gradient of the others"] = max(float(w[KEPT:].norm()) for w in weights)
    return out | {f"memory {kind}": memory(model, meshes, kind, kept) for kind in ("none", "full")}


def memory(model: str, meshes: Meshes, recompute: str, rollout: Rollout) -> dict[str, Any]:
    """Returns the number of live tensors after some passes and after more, and what the routers keep."""
    learner, live = learner_of(model, meshes, f"one/{recompute}"), []
    for number in range(6):
        recorded(learner, replace(rollout, routed_experts=None))
        gradients(learner, rollout, plain_gradient(rollout), False)
        gc.collect()
        if number in (1, 5):
            live.append(sum(isinstance(each, torch.Tensor) for each in gc.get_objects()))
    kept = [choice for router in routers(learner) if isinstance(choice := router.router_replay, RecordingRouterReplay)]
    left = [x for c in kept for x in (c.target_topk_idx, c.recorded_topk_idx, *c.replay_backward_list) if x is not None]
    return {"live": live, "routers": len(kept), "left": len(left)}


def main() -> None:
    model, reference_file, result_file, *layouts = sys.argv[1:]
    platform.init_process_group(TIMEOUT_S)
    meshes, rollout = Meshes(TIMEOUT_S), make_rollout(load_arch(model).vocab_size)
    results: dict[str, Any] = {}
    reference = {} if layouts == ["one"] else torch.load(reference_file)
    for layout in layouts:
        found = passes(learner_of(model, meshes, layout), rollout, reference.get("own"))
        if layout == "one":
            torch.save(found, reference_file)
            results = by_itself(model, meshes, found, rollout)
            continue
        loss, gradient, _ = compare(found["gradients"], reference["gradients"])
        shares: list[Any] = [None] * torch.distributed.get_world_size()
        torch.distributed.all_gather_object(shares, found["share"])
        if rank() != 0:
            assert found["own"].numel() == 0
            continue
        results[layout] = {
            "shares": shares,
            "all": found["all"],
            "terms": found["terms"],
            "noted": differ(found["own"], reference["own"]),
            "changed": abs(found["changed"] - reference["changed"]),
            "log_probs": float((found["log_probs"] - reference["log_probs"]).abs().max()),
            "loss": loss,
            "gradient": gradient,
        }
    if rank() == 0:
        Path(result_file).write_text(json.dumps(results))
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
