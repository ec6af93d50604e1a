"""A batch of jobs by transformers' generate. Rows whose responses have ended leave it while the others go on.

On CPUs a row's bits do not depend on the other rows, except with gated delta nets: see `attention` and `invariant`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import GenerationConfig

from mrl.inference.sglang.cpu_shim.mrl_cpu_engine.batch_invariance import invariant
from mrl.inference.transformers_engine.sampling import Job, PerRowStop, SeededSampler


class ExpertTap:
    """Open (a context), it notes what the modules `...experts` of a model are told, layer by layer: (hidden states,
    experts [tokens, experts a token], their weights)."""

    def __init__(self, model: nn.Module) -> None:
        self._layers = [module for name, module in model.named_modules() if name.endswith(".experts")]
        self._seen: list[list[Tensor]] = []
        self._hooks: list[Any] = []

    def __enter__(self) -> ExpertTap:
        self._seen = [[] for _ in self._layers]
        for seen, layer in zip(self._seen, self._layers):
            self._hooks.append(layer.register_forward_pre_hook(lambda _, told, seen=seen: seen.append(told[1])))
        return self

    def __exit__(self, *error: object) -> None:
        while self._hooks:
            self._hooks.pop().remove()

    def give(self, jobs: Sequence[Job], width: int) -> None:
        """Gives each job of the generated batch its experts. Prompts were padded on the left to `width` tokens; a job's
        last token was not routed."""
        rows = len(jobs)
        layers = [torch.cat([part.view(rows, -1, part.size(-1)) for part in seen], 1).cpu() for seen in self._seen]
        every = torch.stack(layers, 2)  # [rows, width + tokens drawn - 1, layers, experts a token]
        self._seen = []
        for job, own in zip(jobs, every):
            first = width - len(job.prompt)
            if job.asks:
                job.experts = own[first : width + len(job.log_probs) - 1]


LEAVE = 0.75  # of the rows: with fewer that go on, the ended ones leave, and what the others have cached is copied


@torch.inference_mode()
def responses(
    model: Any, jobs: list[Job], tokenizer: Any | None, seen: dict[str, Tensor] | None, tap: ExpertTap | None
) -> Iterator[tuple[int, list[int]]]:
    """(place among the jobs, its new tokens, the stop token included), in the order in which they end. seen: inputs of
    a model that sees, beside tokens and mask; tap: open while tokens are drawn. With one of these all rows stay to the
    end: models note where pictures end, and the tap experts, by rows."""
    ids, mask = padded(jobs)
    width, places, cache = ids.size(1), [*range(len(jobs))], None
    stays = seen is not None or tap is not None
    ids, mask = ids.to(model.device), mask.to(model.device)
    while True:
        rows = [jobs[place] for place in places]
        left = max(job.max_new_tokens for job in rows) - ids.size(1) + width
        settings = GenerationConfig(
            max_new_tokens=left, do_sample=False, pad_token_id=0, eos_token_id=None, return_dict_in_generate=True
        )
        with tap if tap is not None else contextlib.nullcontext(), invariant():
            made = model.generate(
                input_ids=ids,
                attention_mask=mask,
                past_key_values=cache,
                **(seen or {}),
                generation_config=settings,
                logits_processor=[SeededSampler(rows, ids.size(1) - width)],
                stopping_criteria=[PerRowStop(rows, width, tokenizer, 0 if stays else LEAVE)],
            )
        if tap is not None:
            tap.give(jobs, width)
        for place, job, drawn in zip(places, rows, made.sequences[:, width:].tolist(), strict=True):
            if not job.live:
                yield place, drawn[: len(job.log_probs)]
        on = [row for row, job in enumerate(rows) if job.live]
        if not on:
            return
        places, index = [places[row] for row in on], torch.tensor(on, dtype=torch.int64, device=ids.device)
        ids, cache = made.sequences[index], made.past_key_values
        mask = torch.nn.functional.pad(mask[index], (0, ids.size(1) - mask.size(1)), value=1)
        cache.reorder_cache(index)  # which layers with a recurrent state have too


def padded(jobs: list[Job]) -> tuple[Tensor, Tensor]:
    """Prompts and their masks, int64 [jobs, longest], padded on the left."""
    width = max(len(job.prompt) for job in jobs)
    ids, mask = torch.zeros(2, len(jobs), width, dtype=torch.int64)
    for row, job in enumerate(jobs):
        ids[row, width - len(job.prompt) :] = torch.tensor(job.prompt)
        mask[row, width - len(job.prompt) :] = 1
    return ids, mask
