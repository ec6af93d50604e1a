"""Per-sample random streams and stops for transformers' generate: no row's tokens depend on the other rows.

Sampling is the Gumbel-max trick: argmax(log p + noise) is a draw from p when the noise is -log(-log u) with u uniform.
u comes from a hash of (the sample's seed, the position, the token), the same hash and position as SGLang's
deterministic mode, so that with top_k and top_p off both engines draw the same tokens from the same logits.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers import LogitsProcessor, StoppingCriteria

from mrl.inference.sglang.cpu_shim.mrl_cpu_engine.draws import draw
from mrl.inference.transformers_engine.pictures import Inputs

INERT = {  # values of parameters that this engine does not know
    "min_p": 0.0,
    "frequency_penalty": 0.0,
    "presence_penalty": 0.0,
    "repetition_penalty": 1.0,
    "min_new_tokens": 0,
    "n": 1,
}


@dataclass
class Job:
    """One sample being generated."""

    prompt: list[int]
    temperature: float
    top_p: float
    top_k: int
    max_new_tokens: int
    stop: tuple[str, ...]
    stop_ids: frozenset[int]
    seed: int
    inputs: Inputs | None = None  # its pictures
    asks: bool = False  # for the experts that its tokens go to
    experts: Tensor | None = None  # [tokens of prompt and response - 1, layers with experts, experts a token]
    log_probs: list[float] = field(default_factory=list)  # grows with the tokens
    finish: dict[str, Any] | None = None
    is_aborted: bool = False  # it is to end with its next token

    @property
    def live(self) -> bool:
        return self.finish is None


def parse_job(
    input_ids: list[int],
    params: dict[str, Any],
    eos_ids: tuple[int, ...],
    context: int,
    inputs: Inputs | None = None,
    asks: bool = False,
) -> Job:
    """Raises ValueError for parameters that this engine does not know (nothing is ignored in silence), and where
    prompt and max_new_tokens exceed `context` (as SGLang does)."""
    known = {"temperature", "top_p", "top_k", "max_new_tokens", "stop", "stop_token_ids", "sampling_seed", "ignore_eos"}
    known |= {"skip_special_tokens", "no_stop_trim"}
    if unknown := sorted(name for name, value in params.items() if name not in known and value != INERT.get(name)):
        raise ValueError(f"unsupported sampling_params: {', '.join(unknown)}")
    if not input_ids:
        raise ValueError("input_ids is empty")
    new = params.get("max_new_tokens", 128)
    if type(new) is not int or new < 1:
        raise ValueError(f"max_new_tokens: {new!r} is not a number of tokens from 1 on")
    if len(input_ids) + new > context:
        raise ValueError(
            f"{len(input_ids)} tokens of prompt and max_new_tokens = {new} exceed the context of {context}"
        )
    stop = params.get("stop") or ()
    own = frozenset(params.get("stop_token_ids") or ())
    return Job(
        prompt=[int(token) for token in input_ids],
        temperature=float(params.get("temperature", 1.0)),
        top_p=float(params.get("top_p", 1.0)),
        top_k=int(params.get("top_k", -1)),
        max_new_tokens=new,
        stop=(stop,) if isinstance(stop, str) else tuple(stop),
        stop_ids=own if params.get("ignore_eos") else own | frozenset(eos_ids),
        seed=int(params.get("sampling_seed") or 0),
        inputs=inputs,
        asks=asks,
    )


def keep_top(log_probs: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    """-inf outside the top_k most likely tokens and outside the smallest set with probability >= top_p.

    log_probs [rows, vocab]; top_k, top_p [rows]. top_k < 1 and top_p = 1 keep everything.
    """
    ordered, index = log_probs.sort(dim=-1, descending=True, stable=True)
    mass = ordered.exp()
    before = mass.cumsum(-1) - mass
    rank = torch.arange(log_probs.shape[-1], device=log_probs.device)
    limit = torch.where(top_k < 1, log_probs.shape[-1], top_k)[:, None]
    drop = (rank >= limit) | ((before > top_p[:, None]) & (top_p < 1)[:, None])
    return torch.full_like(log_probs, -torch.inf).scatter(-1, index, ordered.masked_fill(drop, -torch.inf))


class SeededSampler(LogitsProcessor):
    """Turns generate's greedy choice into a seeded draw, and notes each choice's log-prob.

    The noted log-probs are log_softmax(logits / temperature), not renormalised for top_k and top_p; of the raw logits
    for a greedy row. drawn: how many tokens the jobs have already.
    """

    def __init__(self, jobs: list[Job], drawn: int = 0) -> None:
        self.jobs = jobs
        self._step = drawn
        temperature = torch.tensor([job.temperature for job in jobs])
        self._greedy = temperature == 0
        self._any_greedy = bool(self._greedy.any())
        self._temperature = temperature.masked_fill(self._greedy, 1.0)[:, None]
        self._scaled = bool((self._temperature != 1).any())
        self._decided: Tensor | None = None
        self._chosen = torch.empty(0, dtype=torch.int64)
        self._top_k = torch.tensor([job.top_k for job in jobs])
        self._top_p = torch.tensor([job.top_p for job in jobs])
        self._filtered = bool(((self._top_k > 0) | (self._top_p < 1)).any())
        self._seeds = torch.tensor([job.seed for job in jobs], dtype=torch.int64)
        self._last = torch.tensor([len(job.prompt) - 1 for job in jobs])  # position of the last prompt token

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        logits = scores.cpu().float()
        log_probs = torch.log_softmax(logits / self._temperature if self._scaled else logits, dim=-1)
        allowed = keep_top(log_probs, self._top_k, self._top_p) if self._filtered else log_probs
        drawn = draw(allowed, self._seeds, self._last + self._step)
        choice = torch.where(self._greedy, log_probs.argmax(-1), drawn) if self._any_greedy else drawn
        chosen = log_probs.gather(-1, choice[:, None])[:, 0].tolist()
        for job, value in zip(self.jobs, chosen):
            if job.live:
                job.log_probs.append(value)
        self._step += 1
        if self._decided is None:  # -inf but at the choices; the same memory at every step
            self._decided = torch.full_like(scores, -torch.inf)
        else:
            self._decided.scatter_(-1, self._chosen, -torch.inf)
        self._chosen = choice[:, None].to(scores.device)
        return self._decided.scatter_(-1, self._chosen, 0.0)


class PerRowStop(StoppingCriteria):
    """Ends each row at its own stop token, stop string or length, and notes why in SGLang's words; ends generate where
    fewer than this share of the rows go on. width: tokens before the responses."""

    def __init__(self, jobs: list[Job], width: int, tokenizer: Any | None, share: float) -> None:
        self.jobs = jobs
        self._tokenizer = tokenizer
        self._width, self._least = width, share * len(jobs)

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        new = input_ids[:, self._width :].tolist()
        for job, tokens in zip(self.jobs, new):
            if job.live:
                job.finish = self._finish(job, tokens)
        ended = [not job.live for job in self.jobs]
        enough = len(ended) - sum(ended) >= self._least
        return torch.tensor(ended if enough else [True] * len(ended), device=input_ids.device)

    def _finish(self, job: Job, tokens: list[int]) -> dict[str, Any] | None:
        if tokens[-1] in job.stop_ids:
            return {"type": "stop", "matched": tokens[-1]}
        if job.stop:
            assert self._tokenizer is not None
            text = self._tokenizer.decode(tokens)
            matched = next((stop for stop in job.stop if stop in text), None)
            if matched is not None:
                return {"type": "stop", "matched": matched}
        if len(tokens) >= job.max_new_tokens:
            return {"type": "length", "length": len(tokens)}
        return {"type": "abort", "message": "aborted by request"} if job.is_aborted else None
