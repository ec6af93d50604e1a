"""Teachers on engines: rank 0 requests their log-probs of a step's samples."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from mrl.config.schema import RLConfig
from mrl.config.secret_file import read_secret
from mrl.config.tokenizer_files import TOKENIZER, difference
from mrl.config.trainers.rl import most_tokens
from mrl.core import Rollout
from mrl.families import engine_arch
from mrl.inference.access import Access
from mrl.inference.errors import EngineStartError
from mrl.inference.teacher_engine import NEVER, NO_TOKEN, TeacherEngine
from mrl.kernels.linear_divergence import TopTokens
from mrl.learner.loss_terms import TeacherTokens
from mrl.units import RESPONSE_TOKEN


@dataclass(frozen=True)
class ServedTokens:
    """Log-probs of a step's response tokens by teachers on engines, in host memory.

    taught [R] bool: tokens of samples that these teachers teach; values of other tokens are undefined
    log_probs [R] float32: of the tokens; top: ids [R, k] int32
    """

    taught: Tensor
    log_probs: Tensor
    top: TopTokens

    def part(self, rollout: Rollout, samples: Tensor, vocab_size: int) -> TeacherTokens:
        """Returns the teacher of an update. rollout: of the step; samples [b]: of the update, in its order."""
        places = RESPONSE_TOKEN.places(rollout, samples)
        return TeacherTokens(self.taught[places], self.top.at(places), vocab_size)


def open_teacher_engines(cfg: RLConfig) -> dict[str, TeacherEngine]:
    """Returns clients of the engines that serve teachers, by the sections of their keys; nothing is sent."""
    found = {}
    for name, model in cfg.teachers().items():
        if model.url is not None:
            assert cfg.teacher is not None
            access = Access(read_secret(model.api_key_file) if model.api_key_file is not None else None)
            found[name] = TeacherEngine(model.url, access, cfg.teacher.concurrent_requests, cfg.teacher.timeout_s)
    return found


def check_teacher_engines(cfg: RLConfig, engines: Mapping[str, TeacherEngine]) -> None:
    """Raises EngineError or EngineStartError for an engine that does not answer or does not suit."""
    for name, engine in engines.items():
        path = cfg.teachers()[name].path
        served = engine.check(name, path, engine_arch(path).family, most_tokens(cfg)).model_path
        if Path(served, TOKENIZER).is_file() and (found := difference(served, cfg.model.path)) is not None:
            raise EngineStartError(f"{name}.url {cfg.teachers()[name].url}: {found}")


def ask(
    engines: Mapping[str, TeacherEngine],
    samples: Mapping[str, Tensor],
    rollout: Rollout,
    top_k: int,
    on_sequence: Callable[[], object],
) -> ServedTokens:
    """Returns what each engine says of its samples [b], by name. on_sequence: called after each sequence"""
    count = rollout.num_response_tokens
    taught, log_probs = torch.zeros(count, dtype=torch.bool), torch.zeros(count)
    ids = torch.full((count, top_k), NO_TOKEN, dtype=torch.int32)
    top = TopTokens(ids, torch.full((count, top_k), NEVER))
    work = {name: list(_sequences(rollout, own)) for name, own in samples.items()}
    scored = {name: engines[name].score([each.asked for each in own], top_k) for name, own in work.items()}
    for name, own in work.items():
        for each, found in zip(own, scored[name], strict=True):
            taught[each.places] = True
            log_probs[each.places] = torch.from_numpy(found.log_probs)[each.mask]
            top.ids[each.places] = torch.from_numpy(found.top_ids)[each.mask].int()
            top.log_probs[each.places] = torch.from_numpy(found.top_log_probs)[each.mask]
            on_sequence()
    return ServedTokens(taught, log_probs, top)


@dataclass(frozen=True)
class _Sequence:
    """A sequence to score.

    asked: its tokens up to the last generated one, and the index of the first generated one
    mask: which tokens from that one on were generated; places: these among the response tokens
    """

    asked: tuple[list[int], int]
    mask: Tensor
    places: Tensor


def _sequences(rollout: Rollout, samples: Tensor) -> Iterator[_Sequence]:
    shown, numbers = rollout.split_sequences(samples.tolist())
    ends = shown.seq_lens.cumsum(0).tolist()
    for number in numbers:
        places = RESPONSE_TOKEN.places(shown, torch.tensor([number]))
        if not places.numel():
            continue
        start, end = ends[number] - int(shown.seq_lens[number]), ends[number]
        prompt = int(shown.prompt_lens[number])
        mask = torch.arange(end - start) >= prompt if shown.action_mask is None else shown.action_mask[start:end]
        drawn = mask.nonzero().flatten().tolist()
        first, last = drawn[0], drawn[-1] + 1
        yield _Sequence((shown.tokens[start : start + last].tolist(), first), mask[first:last], places)
