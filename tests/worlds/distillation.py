"""Run under torchrun: loss and every gradient of on-policy distillation under many layouts.

Usage: distillation.py FOLDER RESULT_JSON LAYOUT [LAYOUT ...]. FOLDER has the models student, small and large, the
teachers. Layouts are as in gradients.py. The result is {layout: {case: [relative loss error, worst relative gradient
error, its tensor]}} against transformers in float64, one sequence at a time. A world of one process writes these
references to FOLDER/reference.pt; larger worlds read them.
"""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from mrl import platform

platform.install()

from transformers import AutoModelForCausalLM  # noqa: E402

from mrl.config.schema import ParallelConfig, RLConfig, TrainConfig  # noqa: E402
from mrl.core import Rollout  # noqa: E402
from mrl.families import load_arch  # noqa: E402
from mrl.inference.teacher_engine import ScoredTokens  # noqa: E402
from mrl.learner import Learner, losses  # noqa: E402
from mrl.parallel import Meshes, rank  # noqa: E402
from mrl.trainers.rl import distillation  # noqa: E402
from mrl.trainers.rl.experience import Passes, make_experience  # noqa: E402
from mrl.trainers.rl.policy_update import policy_targets  # noqa: E402
from tests.helpers.bare_run import bare_run  # noqa: E402
from tests.helpers.divergences import DIVERGENCES, by_the_papers, with_one_teacher  # noqa: E402
from tests.worlds.gradients import Result, compare, everywhere, make_rollout, make_several, make_trajectories, parse  # noqa: E402

TIMEOUT_S, TEMPERATURE, COEF, POLICY_COEF = 600, 0.7, 0.3, 0.5
VOCAB = 313  # vocabulary of student and small; large has more ids, which no text uses
ONE = ("large",)
TWO = ("small", "large")
TOP_K = 8
URL = {"url": "http://localhost:1"}


def is_served(case: str, name: str) -> bool:
    """True if an engine has this teacher: the large one, in cases named "top"."""
    return case.startswith("top") and name == "large"


def config(
    folder: Path, case: str, kind: str, mix: float, teachers: tuple[str, ...], layout: ParallelConfig
) -> RLConfig:
    each = {name: {"path": str(folder / name)} | (URL if is_served(case, name) else {}) for name in teachers}
    own: dict[str, Any] = each[teachers[0]] if len(teachers) == 1 else {"teachers": each}
    own |= {"top_k": TOP_K}
    if kind == "jsd" or kind.startswith("skewed"):
        own["beta" if kind == "jsd" else "skew"] = mix
    return RLConfig.model_validate(
        {
            "trainer": "rl",
            "run": {"name": "distillation"},
            "model": {"path": str(folder / "student")},
            "actor": {"parallel": layout},
            "data": {"train": "-"},
            "reward": {"function": "exact_match"},
            "rollout": {"sampling": {"temperature": TEMPERATURE}},
            "batch": {"prompts_per_step": 5, "samples_per_prompt": 2},
            "algorithm": {"adv_estimator": "grpo"},
            "teacher": {"divergence": kind, "coef": COEF, "policy_coef": POLICY_COEF, **own},
        }
    )


def samples(case: str, teachers: tuple[str, ...]) -> Rollout:
    """Returns a rollout in groups of two; with two teachers, one sample of each group belongs to each."""
    rollout = make_rollout(VOCAB)
    if case.endswith("several"):
        rollout = make_several(make_trajectories(rollout))
    sources = torch.arange(rollout.num_samples) % len(teachers)
    return replace(rollout, sources=sources, source_names=teachers if len(teachers) > 1 else ("",))


def cases() -> list[tuple[str, str, float, tuple[str, ...]]]:
    of_one = with_one_teacher(torch.distributed.get_world_size())
    found = [(f"{kind} {mix} 1", kind, mix, ONE) for kind, mix in of_one]
    found += [(f"{kind} {mix} 2", kind, mix, TWO) for kind, mix in DIVERGENCES]
    found += [(f"top {kind} {mix} 1", kind, mix, ONE) for kind, mix in DIVERGENCES[:3]]
    return [*found, ("several", "reverse_kl", 0.1, TWO), ("top several", "jsd", 0.3, TWO)]


class Served:
    """Engine stand-in: log-probs of sequences from transformers in float64."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def score(self, sequences: list[tuple[list[int], int]], top_k: int) -> list[ScoredTokens]:
        return [self._score(torch.tensor(ids), first, top_k) for ids, first in sequences]

    def _score(self, ids: torch.Tensor, first: int, top_k: int) -> ScoredTokens:
        log_p = log_probs_of(self._path, ids)[first - 1 : -1]
        top, own = log_p.topk(top_k, -1), log_p.gather(1, ids[first:, None])[:, 0]
        return ScoredTokens(own.float().numpy(), top.indices.numpy(), top.values.float().numpy())


def add_teachers(run: Any, folder: Path, learners: dict[str, Learner], case: str, names: tuple[str, ...]) -> None:
    sections = dict(zip(run.cfg.teachers(), names, strict=True))
    run.teachers = {key: learners[name] for key, name in sections.items() if not is_served(case, name)}
    run.teacher_engines = {key: Served(folder / name) for key, name in sections.items() if is_served(case, name)}
    note = SimpleNamespace(note=lambda: None)
    run.world = SimpleNamespace(from_main=lambda what, make: make(), activity=note)


def of_mrl(
    folder: Path, learners: dict[str, Learner], case: str, kind: str, mix: float, names: tuple[str, ...]
) -> Result:
    actor = learners["student"]
    run = bare_run(config(folder, case, kind, mix, names, actor.mesh.cfg), actor, None)
    add_teachers(run, folder, learners, case, names)
    rollout = samples(case, names)
    exp = make_experience(run.cfg.algorithm, rollout, Passes(), 0.0)
    assert run.cfg.teacher is not None
    states, (sample_ids,) = distillation.states_of_teachers(run, exp), run.minibatches(rollout)
    assert states is not None
    targets = policy_targets(run, exp, 0)
    algorithm = run.cfg.algorithm
    loss = losses.policy(algorithm.policy_loss, algorithm.kl, 0.0, targets)
    loss = distillation.distilled(run.cfg.teacher, loss, rollout, targets, states[tuple(sample_ids)])
    metrics = actor.backward(rollout, sample_ids, loss, TEMPERATURE, full_gradients=True)
    assert metrics["actor/entropy"] > 0 and metrics["distill/kl"] > 0
    if len(names) > 1:
        counts = torch.zeros(2).index_add(0, rollout.sources, rollout.response_lens.float())  # type: ignore[arg-type]
        mean = sum(metrics[f"distill/{name}"] * float(count) for name, count in zip(names, counts, strict=True))
        assert abs(mean / rollout.num_response_tokens - metrics["distill/kl"]) < 1e-5 * metrics["distill/kl"]
    return metrics["loss"], everywhere(actor, lambda p: p.main_grad)


@cache
def in_float64(path: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float64)


def log_probs_of(path: Path, ids: torch.Tensor) -> torch.Tensor:
    """Returns a teacher's log-probs in float64, [length, vocabulary]."""
    return _log_probs_of(path, tuple(ids.tolist()))


@cache  # many cases have the same sequences, so results are cached
@torch.no_grad()
def _log_probs_of(path: Path, ids: tuple[int, ...]) -> torch.Tensor:
    return (in_float64(path)(torch.tensor([ids])).logits[0] / TEMPERATURE).log_softmax(-1)


def of_transformers(folder: Path, case: str, kind: str, mix: float, names: tuple[str, ...]) -> Result:
    student, rollout = in_float64(folder / "student"), samples(case, names)
    student.zero_grad()
    cfg = config(folder, case, kind, mix, names, ParallelConfig())
    advantages = make_experience(cfg.algorithm, rollout, Passes(), 0.0).advantages.double()
    total, at = torch.zeros((), dtype=torch.float64), 0
    cut = rollout.split_sequences(range(rollout.num_samples))[0]
    of_sample = torch.arange(rollout.num_samples)
    if rollout.sequence_counts is not None:
        of_sample = of_sample.repeat_interleave(rollout.sequence_counts)
    drawn = rollout.action_mask
    if drawn is None:
        parts = zip(rollout.seq_lens, rollout.prompt_lens, strict=True)
        drawn = torch.cat([torch.arange(int(n)) >= p for n, p in parts])
    lengths = cut.seq_lens.tolist()
    for sample, ids, mask in zip(of_sample, rollout.tokens.split(lengths), drawn.split(lengths), strict=True):
        assert rollout.sources is not None
        name, places = names[int(rollout.sources[sample])], mask.nonzero().flatten()
        log_q = (student(ids[None]).logits[0, :, :VOCAB] / TEMPERATURE).log_softmax(-1)[places - 1]
        log_p = log_probs_of(folder / name, ids)[places - 1]
        log_probs = log_q.gather(1, ids[places, None])[:, 0]
        advantage = advantages[at : at + len(places)]
        total = total - POLICY_COEF * (advantage * (log_probs - log_probs.detach()).exp()).sum()
        if is_served(case, name):
            for both in map(of_top, log_p.exp(), log_q.exp()):
                total = total + COEF * by_the_papers(kind, mix, *both)
        else:
            total = total + COEF * by_the_papers(kind, mix, log_p[:, :VOCAB].softmax(-1), log_q.exp()).sum()
        at += len(places)
    assert at == rollout.num_response_tokens
    (total / at).backward()
    return float(total / at), {name: x.grad.clone() for name, x in student.named_parameters() if x.grad is not None}


def of_top(p: torch.Tensor, q: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns p and q over the top outcomes of a teacher whose vocabulary exceeds the student's. Ids that the student
    lacks count as "any other token", or get no weight."""
    q = torch.nn.functional.pad(q, (0, p.numel() - q.numel()))
    ids = p.topk(TOP_K).indices
    ids = ids[ids < VOCAB]
    return tuple(torch.cat([x[ids], 1 - x[ids].sum()[None]]) for x in (p, q))  # type: ignore[return-value]


def sampled(folder: Path, learners: dict[str, Learner], case: str) -> list[object]:
    """Compares advantages from the teachers' log-probs of the sampled tokens with those from transformers."""
    actor = learners["student"]
    run = bare_run(config(folder, case, "sampled", 0.1, TWO, actor.mesh.cfg), actor, None)
    add_teachers(run, folder, learners, case, TWO)
    rollout = samples("", TWO)
    exp = make_experience(run.cfg.algorithm, rollout, Passes(), 0.0)
    assert run.cfg.teacher is not None and rollout.sources is not None
    got, metrics = distillation.with_sampled_divergence(run, run.cfg.teacher, exp)
    wanted, ends = [], rollout.seq_lens.cumsum(0)
    for sample, end in enumerate(ends.tolist()):
        ids = rollout.tokens[end - int(rollout.seq_lens[sample]) : end]
        log_p = log_probs_of(folder / TWO[int(rollout.sources[sample])], ids)
        first = int(rollout.prompt_lens[sample])
        wanted.append(log_p[first - 1 : -1].gather(1, ids[first:, None])[:, 0])
    ratios = torch.cat(wanted) - rollout.rollout_log_probs
    want = POLICY_COEF * exp.advantages + COEF * ratios
    mean = float(-ratios.mean())
    error = float((got.advantages - want).norm() / want.norm())
    return [abs(metrics["distill/kl"] - mean) / abs(mean), error, "advantages"]


def main() -> None:
    folder, result, *layouts = sys.argv[1:]
    platform.init_process_group(TIMEOUT_S)
    meshes, results, models = Meshes(TIMEOUT_S), {}, Path(folder)
    reference = models / "reference.pt"
    if torch.distributed.get_world_size() == 1:
        torch.save({case: of_transformers(models, case, *how) for case, *how in cases()}, reference)  # type: ignore[arg-type]
    wanted = torch.load(reference) if rank() == 0 else {}
    for layout in layouts:
        mesh = meshes.get(parse(layout))
        train = TrainConfig(parallel=mesh.cfg, max_tokens_per_microbatch=96)
        learners = {
            name: Learner(
                "policy", load_arch(str(models / name)), str(models / name), train, mesh,
                dtype=torch.float32, seed=0, trainable=name == "student",
            )
            for name in ("student", *TWO)
        }  # fmt: skip
        results[layout] = {}
        for case, *how in cases():
            found = of_mrl(models, learners, case, *how)  # type: ignore[arg-type]
            if rank() == 0:
                results[layout][case] = compare(found, wanted[case])
        for case in ("sampled", "top sampled"):
            results[layout][case] = sampled(models, learners, case)
    if rank() == 0:
        Path(result).write_text(json.dumps(results))
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
