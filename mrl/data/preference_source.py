"""Usable preferences of one source, tokenised."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from mrl.config.schema import SourceConfig
from mrl.data.columns import unused_columns
from mrl.data.encoded_rows import EncodedSource
from mrl.data.encoder import Encoder
from mrl.data.preference_forms import Comparison
from mrl.data.preference_rows import PreferenceReader, RenderedPreferenceRow

if TYPE_CHECKING:
    from mrl.data.image_processor import Grid


@dataclass(frozen=True)
class Preference:
    """One comparison of a usable row.

    index: its row number; prompt, responses: int32 ids, the best response first; scores: for each response the number
    of worse ones, its own score, or a label's 1 or 0; steps: number of response tokens up to each step's end, with a
    score each; margin: required lead of the first response; cut: True for each response that lacks its end; grids:
    patch grids of the prompt's images
    """

    index: int
    prompt: np.ndarray
    responses: tuple[np.ndarray, ...]
    scores: tuple[float, ...]
    margin: float | None
    source: str | None
    cut: tuple[bool, ...]
    steps: tuple[int, ...] = ()
    grids: tuple[Grid, ...] = ()

    @property
    def is_cut(self) -> bool:
        return any(self.cut)


class PreferenceSource(EncodedSource[Preference]):
    """Preferences of one source. Dropped and truncated comparisons are counted; a ranked list can have several:

    long_prompt: dropped, their prompt is over `data.max_prompt_tokens` or fills `data.max_tokens`
    long_response: dropped, a response does not fit into `data.max_tokens`, and truncation is off
    same: dropped, two responses are the same, if only after the cut
    tied: dropped, their responses have the same rank
    cut_prompt, cut: kept with a shorter prompt, or a response without its end
    merged: kept; the tokens of prompt plus response do not begin with the prompt's own tokens: the prompt's last
    tokens, at most `most_merged`, then belong to the responses
    endless: kept; the chat template ends the best response without an end token
    ends: end tokens that the model learns to stop with
    cuts: truncate responses at `data.max_tokens`
    Raises DataError that names every malformed row.
    """

    def __init__(
        self, source: SourceConfig, encoder: Encoder, reader: PreferenceReader, first_index: int, cuts: bool
    ) -> None:
        super().__init__(source, encoder, first_index)
        self.long_prompt = self.long_response = self.same = self.tied = 0
        self.cut_prompt = self.cut = self.merged = self.most_merged = self.endless = 0
        self.end_tokens: set[int] = set()
        self._reader, self._cfg, self._cuts = reader, reader.cfg, cuts
        self._keep(self._encoded())

    @property
    def num_dropped(self) -> int:
        return self.long_prompt + self.long_response + self.same + self.tied

    def _encoded(self) -> Iterator[Preference]:
        in_steps = self._reader.form == "steps"
        for found in self._parts(self._rendered_row):
            parts = {i: ([row.prompt] if row.prompt else []) + [*row.wholes] for i, row in found.items()}
            texts = [each for of_row in parts.values() for each in of_row]
            ids = iter(self._encoder.ids(texts) if not in_steps else self._step_by_step([*found.values()]))
            for i, row in found.items():
                self.as_text += [*filter(None, (each.as_text for each in parts[i]))][:1]
                self.as_control += [*filter(None, (each.as_control for each in parts[i]))][:1]
                prompt = next(ids) if row.prompt else None
                wholes = [next(ids) for _ in row.wholes]
                try:
                    prompt, wholes = self._with_pictures(row, prompt, wholes)
                except ValueError as error:
                    self._problems.append((self.rows.where(i), str(error)))
                    continue
                if in_steps:
                    yield from filter(None, [self._solution(i, row, prompt or [], wholes)])
                    continue
                yield from self._fitting(i, row, prompt, [self._ended(each) for each in wholes])

    def _rendered_row(self, i: int) -> RenderedPreferenceRow:
        found, image_processor = self._reader.read(self.rows, i, self.source.name), self._encoder.image_processor
        self.unused_columns.update(unused_columns(found, self._cfg, image_processor is not None, self._reader.margins))
        row = self._reader.render(found, self._encoder)
        return row if image_processor is None else replace(row, grids=image_processor.grids(self.rows[i], self.root))

    def _with_pictures(
        self, row: RenderedPreferenceRow, prompt: list[int] | None, wholes: list[list[int]]
    ) -> tuple[list[int] | None, list[list[int]]]:
        """Expands the image tokens; steps have no prompt of their own. Raises ValueError if they do not match the row's
        images.
        """
        image_processor = self._encoder.image_processor
        if image_processor is None:
            return prompt, wholes
        shown = () if self._reader.form == "steps" else row.grids
        return (
            None if prompt is None else image_processor.expand_image_tokens(prompt, row.grids),
            [image_processor.expand_image_tokens(ids, shown) for ids in wholes],
        )

    def _ended(self, ids: list[int]) -> list[int]:
        """Returns text with one EOS at its end. A conversation ends as its template does, or as `Turns` ends it.
        Without truncation, white space behind the EOS of its last turn is removed, since sampled answers end with
        EOS.
        """
        eos, follows = self._encoder.tokenizer.eos_id, self._encoder.tokenizer.next_turn_token
        if self._cfg.chat_template and follows is not None:
            return [*ids, follows]
        if self._cfg.chat_template and not self._cuts and eos in ids:
            end = len(ids) - ids[::-1].index(eos)
            return ids if self._encoder.tokenizer.decode(ids[end:], special=True).strip() else ids[:end]
        return ids if self._cfg.chat_template else self._encoder.tokenizer.with_eos(ids)

    def _step_by_step(self, rows: list[RenderedPreferenceRow]) -> Iterator[list[int]]:
        """Yields the prompt's ids of each row, then those of its steps, which are tokenised separately."""
        prompts = iter(self._encoder.ids([row.prompt for row in rows if row.prompt]))
        steps = iter(self._encoder.answers([each.text for row in rows for each in row.wholes]))
        for row in rows:
            yield next(prompts)
            yield from (next(steps) for _ in row.wholes)

    def _solution(
        self, i: int, row: RenderedPreferenceRow, prompt: list[int], steps: list[list[int]]
    ) -> Preference | None:
        """Returns the solution in steps; None for a row that is dropped (and counted) or unusable."""
        cfg, ids = self._cfg, [token for step in steps for token in step]
        problem = self._refused(prompt) if prompt and all(steps) else "the prompt or a step has no tokens"
        start = self._shortened(prompt)
        if problem:
            self._problems.append((self.rows.where(i), problem))
        elif len(start) > cfg.max_prompt_tokens or len(start) >= cfg.max_tokens:
            self.long_prompt += 1
        elif len(start) + len(ids) > cfg.max_tokens:
            self.long_response += 1
        else:
            self.cut_prompt += len(start) < len(prompt)
            ends = tuple(int(end) for end in np.cumsum([len(step) for step in steps]))
            parts = [np.asarray(part, dtype=np.int32) for part in (start, ids)]
            scores = tuple(score for _, score in row.comparisons[0])
            index = self.first_index + i
            return Preference(index, parts[0], (parts[1],), scores, None, row.source, (False,), ends, row.grids)
        return None

    def _refused(self, prompt: list[int]) -> str | None:
        """Returns the reason why the run fails with this prompt; None if it does not."""
        cfg = self._cfg
        if len(prompt) <= cfg.max_prompt_tokens or cfg.truncation != "error":
            return None
        return f"{len(prompt)} tokens, more than data.max_prompt_tokens={cfg.max_prompt_tokens} (data.truncation)"

    def _shortened(self, prompt: list[int]) -> list[int]:
        """Returns the prompt, cut to `data.max_prompt_tokens` if `data.truncation` cuts prompts."""
        is_cut = len(prompt) > self._cfg.max_prompt_tokens and self._cfg.truncation in ("left", "right", "middle")
        return self._encoder.cut(prompt) if is_cut else prompt

    def _fitting(
        self, i: int, row: RenderedPreferenceRow, prompt: list[int] | None, wholes: list[list[int]]
    ) -> Iterator[Preference]:
        """Yields the comparisons of a row, within the limits.

        The prompt ends where its own tokens and those of every prompt plus response diverge: tokens may merge over its
        end.
        """
        self.tied += row.tied
        shared = min(common_start(*wholes, *([prompt] if prompt else [])), *(len(ids) - 1 for ids in wholes))
        cfg, ids = self._cfg, wholes[0][:shared]
        if shared < 1:
            problem: str | None = "prompt and responses have no common first token" if wholes[0] else "no tokens"
        elif row.grids and self._images(ids) < self._images(wholes[0]):
            problem = "the chat template places the images differently once a response follows"
        else:
            problem = self._refused(ids)
        if problem:
            self._problems.append((self.rows.where(i), problem))
            return
        ids = self._shortened(ids)
        if len(ids) > cfg.max_prompt_tokens or len(ids) >= cfg.max_tokens:
            self.long_prompt += len(row.comparisons)
            return
        merged = 0 if prompt is None else len(prompt) - shared
        for comparison in row.comparisons:
            kept = self._kept(
                self.first_index + i, row, ids, [wholes[place][shared:] for place, _ in comparison], comparison
            )
            if kept is not None:
                self.cut_prompt, self.cut = self.cut_prompt + (len(ids) < shared), self.cut + kept.is_cut
                self.merged, self.most_merged = self.merged + (merged > 0), max(self.most_merged, merged)
                yield kept

    def _images(self, ids: list[int]) -> int:
        assert self._encoder.image_processor is not None
        return ids.count(self._encoder.image_processor.vision.image_token)

    def _kept(
        self,
        index: int,
        row: RenderedPreferenceRow,
        prompt: list[int],
        responses: list[list[int]],
        comparison: Comparison,
    ) -> Preference | None:
        """Returns one comparison; None if it is dropped, which is counted."""
        room = self._cfg.max_tokens - len(prompt)
        cut = tuple(len(ids) > room for ids in responses)
        if any(cut) and not self._cuts:
            self.long_response += 1
            return None
        parts = [np.asarray(ids[:room], dtype=np.int32) for ids in responses]
        if not cut[0]:
            end = self._encoder.tokenizer.end_token_of(responses[0])
            self.endless += end is None
            self.end_tokens.update(() if end is None else (end,))
        if len({part.tobytes() for part in parts}) < len(parts):
            self.same += 1
            return None
        scores = tuple(score for _, score in comparison)
        start = np.asarray(prompt, dtype=np.int32)
        return Preference(index, start, tuple(parts), scores, row.margin, row.source, cut, grids=row.grids)


def common_start(*lists: Sequence[int]) -> int:
    """Returns the number of leading items that all lists share."""
    shortest = min(map(len, lists))
    return next((i for i in range(shortest) if any(each[i] != lists[0][i] for each in lists)), shortest)
