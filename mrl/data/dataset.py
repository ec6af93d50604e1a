"""Prompts from a JSONL file. Which prompts a step gets depends on (seed, step) alone: no state to save."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch

from mrl.config.schema import DataConfig
from mrl.core import Prompt, Rollout
from mrl.data.tokenizer import Tokenizer

MAX_REPORTED = 10
Item = TypeVar("Item")


class DataError(ValueError):
    """Rows that cannot be used; one line a row, with file and line number."""


class PromptDataset:
    """The rows of one JSONL file, tokenised.

    Rows whose prompt has more than `cfg.max_prompt_tokens` tokens are left out; `dropped` counts them. `Prompt.index`
    is the row's number in the file (from 0, blank lines not counted), with or without drops.

    Raises DataError for malformed rows, missing keys, empty prompts, and if nothing is left; with `require_answer`
    also for rows without a text under `cfg.answer_key`.
    """

    def __init__(self, path: str | Path, cfg: DataConfig, tokenizer: Tokenizer, require_answer: bool = False) -> None:
        self.path = Path(path)
        self.cfg = cfg
        self.tokenizer = tokenizer
        self._lines, rows = _read_jsonl(self.path)
        if require_answer:
            self._check(rows, lambda row: _answer_problem(row, cfg.answer_key))
        texts, ids = self._encode(rows)
        self._check(ids, lambda x: None if x else "the prompt has no tokens")
        kept = [i for i, x in enumerate(ids) if len(x) <= cfg.max_prompt_tokens]
        self.dropped = len(ids) - len(kept)
        self.prompts = [Prompt(i, tuple(ids[i]), rows[i], texts[i]) for i in kept]
        if not self.prompts:
            why = f"all {self.dropped} prompts have more than data.max_prompt_tokens={cfg.max_prompt_tokens} tokens"
            raise DataError(f"{self.path}: {why if self.dropped else 'no rows'}")

    def __len__(self) -> int:
        return len(self.prompts)

    def prompts_for_step(self, step: int, n: int, seed: int) -> list[Prompt]:
        """The n prompts of step `step` (from 0): places step*n ... of an endless row of epochs, each a permutation."""
        if step < 0:
            raise ValueError(f"step {step} is negative")
        places = range(step * n, (step + 1) * n)
        epochs = {e: self._epoch(e, seed) for e in {p // len(self) for p in places}}
        return [self.prompts[epochs[p // len(self)][p % len(self)]] for p in places]

    def first(self, n: int) -> list[Prompt]:
        """The first n prompts of the file (all of them if there are fewer): the same ones at every validation."""
        return self.prompts[:n]

    def sft_rollout(self, step: int, n: int, seed: int) -> Rollout:
        """A step of supervised fine-tuning: n prompts, each with its answer + EOS as the response.

        Prompt and answer are tokenised apart, as they are in sampling. Scores and log-probs are zeros.
        """
        prompts = self.prompts_for_step(step, n, seed)
        self._check_prompts(prompts)
        answers = self.tokenizer.encode_plain([p.row[self.cfg.answer_key] for p in prompts])
        sequences = [[*p.token_ids, *answer, self.tokenizer.eos_id] for p, answer in zip(prompts, answers, strict=True)]
        seq_lens = torch.tensor([len(s) for s in sequences])
        prompt_lens = torch.tensor([len(p.token_ids) for p in prompts])
        return Rollout(
            step=step,
            tokens=torch.tensor([t for s in sequences for t in s]),
            seq_lens=seq_lens,
            prompt_lens=prompt_lens,
            group=torch.arange(n),
            scores=torch.zeros(n),
            rollout_log_probs=torch.zeros(int((seq_lens - prompt_lens).sum())),
        )

    def _epoch(self, epoch: int, seed: int) -> np.ndarray:
        if not self.cfg.shuffle:
            return np.arange(len(self))
        return np.random.default_rng([seed, epoch]).permutation(len(self))

    def _encode(self, rows: list[dict[str, Any]]) -> tuple[list[str], list[list[int]]]:
        key, chat = self.cfg.prompt_key, self.cfg.chat_template
        self._check(rows, lambda row: _prompt_problem(row, key, chat))
        values = [row[key] for row in rows]
        if not chat:
            return values, self.tokenizer.encode_prompts(values)
        if not self.tokenizer.has_chat_template:
            raise DataError("data.chat_template is true but the tokenizer has no chat template; set it to false")
        conversations = [[{"role": "user", "content": v}] if isinstance(v, str) else v for v in values]
        texts = [self.tokenizer.dress(c) for c in conversations]
        return texts, self.tokenizer.encode_plain(texts)

    def _check(self, items: list[Item], problem: Callable[[Item], str | None]) -> None:
        found = [(line, what) for line, item in zip(self._lines, items, strict=True) if (what := problem(item))]
        _raise_for(self.path, found)

    def _check_prompts(self, prompts: list[Prompt]) -> None:
        found = [(self._lines[p.index], what) for p in prompts if (what := _answer_problem(p.row, self.cfg.answer_key))]
        _raise_for(self.path, found)


def data_notes(tokenizer: Tokenizer, sets: Mapping[str, PromptDataset]) -> list[str]:
    """What was corrected or left out, one sentence each. `sets`: by the key that names the file."""
    return [
        *tokenizer.notes,
        *(
            f"{key}: {data.dropped} prompts over {data.cfg.max_prompt_tokens} tokens left out"
            for key, data in sets.items()
            if data.dropped
        ),
    ]


def _read_jsonl(path: Path) -> tuple[list[int], list[dict[str, Any]]]:
    """(line numbers from 1, rows); blank lines are skipped."""
    if not path.is_file():
        raise DataError(f"{path} does not exist; data.train and data.validation name JSONL files")
    lines: list[int] = []
    rows: list[dict[str, Any]] = []
    problems: list[tuple[int, str]] = []
    for number, raw in enumerate(path.read_bytes().split(b"\n"), start=1):
        if not raw.strip():
            continue
        try:
            row = json.loads(raw)
        except (json.JSONDecodeError, UnicodeDecodeError) as error:
            problems.append((number, f"not valid JSON: {error}"))
            continue
        if not isinstance(row, dict):
            problems.append((number, f"a row must be a JSON object, this is a {type(row).__name__}"))
            continue
        lines.append(number)
        rows.append(row)
    _raise_for(path, problems)
    return lines, rows


def _raise_for(path: Path, problems: list[tuple[int, str]]) -> None:
    if not problems:
        return
    shown = [f"{path}:{line}: {what}" for line, what in problems[:MAX_REPORTED]]
    if len(problems) > MAX_REPORTED:
        shown.append(f"... and {len(problems) - MAX_REPORTED} more rows")
    raise DataError("\n".join(shown))


def _missing(row: dict[str, Any], key: str, setting: str) -> str:
    return f"no key {key!r} ({setting}); the row has: {', '.join(map(repr, row)) or 'nothing'}"


def _prompt_problem(row: dict[str, Any], key: str, chat: bool) -> str | None:
    if key not in row:
        return _missing(row, key, "data.prompt_key")
    value = row[key]
    if isinstance(value, str):
        return None
    if not chat:
        hint = "; chat messages need data.chat_template: true" if isinstance(value, list) else ""
        return f"{key!r} must be text, not {type(value).__name__}{hint}"
    if (
        isinstance(value, list)
        and value
        and all(isinstance(m, dict) and {"role", "content"} <= m.keys() for m in value)
    ):
        return None
    return f"{key!r} must be text or a list of messages with 'role' and 'content'"


def _answer_problem(row: dict[str, Any], key: str) -> str | None:
    if key not in row:
        return _missing(row, key, "data.answer_key")
    if not isinstance(row[key], str):
        return f"{key!r} must be text, not {type(row[key]).__name__}"
    return None
