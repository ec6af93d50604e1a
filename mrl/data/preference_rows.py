"""Preference rows: from the row as written to the texts that are tokenised."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from mrl.config.schema import Form, PreferenceDataConfig, RewardDataConfig
from mrl.data import preference_forms as forms
from mrl.data.columns import conversation, read_template_variables
from mrl.data.encoder import Encoder, RenderedPrompt
from mrl.data.image_prompts import with_image_text
from mrl.data.preference_forms import Comparison
from mrl.data.rows import Row, complete_row, content_problem, missing_key_problem, with_data_source
from mrl.data.sources import Rows

if TYPE_CHECKING:
    from mrl.data.image_processor import Grid


@dataclass(frozen=True)
class RenderedPreferenceRow:
    """Texts and comparisons of one row.

    prompt: None if the responses begin with it; wholes: prompt and response together, for each response; comparisons:
    between them; tied: comparisons of a ranked list that are dropped for equal rank; grids: patch grids of
    the prompt's images
    """

    prompt: RenderedPrompt | None
    wholes: tuple[RenderedPrompt, ...]
    comparisons: tuple[Comparison, ...]
    tied: int
    margin: float | None
    source: str | None
    grids: tuple[Grid, ...] = ()


@dataclass(frozen=True)
class PreferenceReader:
    """Reader of preference rows. form: contents of a row in a batch; margins: every row has one."""

    cfg: PreferenceDataConfig
    form: Form
    margins: bool = False

    def read(self, rows: Rows, i: int, source_name: str | None) -> Row:
        """Returns the completed row. Raises ValueError, which says why the row cannot be used."""
        cfg = self.cfg
        row = with_data_source(complete_row(rows[i], cfg, source_name), cfg.data_source_key)
        for setting, key in cfg.needed(self.form, forms.present_keys(row), self.margins).items():
            if row.get(key) is None:
                raise ValueError(missing_key_problem(row, key, f"data.{setting}"))
        prompt, responses = row.get(cfg.prompt_key), forms.read_responses(row, cfg, self.form).responses
        if prompt is not None and (problem := content_problem(prompt, cfg.prompt_key, cfg.chat_template)):
            raise ValueError(problem)
        if prompt is None and len({type(response) for response in responses.values()}) > 1:
            raise ValueError("some responses are text, others lists of messages: give all in one form")
        if prompt is None and cfg.chat_template and any(isinstance(response, str) for response in responses.values()):
            raise ValueError("responses are text without a prompt: data.chat_template needs a prompt or messages")
        if self.margins:
            forms.margin(row, cfg.margin_key)
        return row

    def render(self, row: Row, encoder: Encoder) -> RenderedPreferenceRow:
        """Returns the texts to tokenise of a row that `read` returned. Raises ValueError for a conversation that the
        chat template refuses, or responses that do not continue the prompt.
        """
        cfg, found = self.cfg, forms.read_responses(row, self.cfg, self.form)
        prompt, responses = row.get(cfg.prompt_key), list(found.responses.values())
        start: RenderedPrompt | None
        if self.form == "steps":
            start, wholes = self._in_steps(row, responses, encoder)
        elif cfg.chat_template:
            template_variables, (before, answers) = (
                read_template_variables(row, cfg),
                forms.split_responses(prompt, found.responses),
            )
            before = conversation(before, row, cfg, encoder.num_pictures(row))
            start = encoder.conversation(before, template_variables, is_whole=False)
            wholes = [encoder.conversation([*before, *answer], template_variables, is_whole=True) for answer in answers]
        else:
            text = self._prompt(row, encoder)
            start = None if text is None else encoder.text_of(text)
            wholes = [encoder.text_of((text or "") + response) for response in responses]
        comparisons, tied = forms.comparisons_of(found.scores, self.form, cfg.ranked_pairs == "all")
        lead = forms.margin(row, cfg.margin_key) if self.margins else None
        return RenderedPreferenceRow(start, tuple(wholes), tuple(comparisons), tied, lead, row.get(cfg.data_source_key))

    def _prompt(self, row: Row, encoder: Encoder) -> str | None:
        """Returns the prompt without a chat template; None for a row whose responses begin with it."""
        prompt, pictures = row.get(self.cfg.prompt_key), encoder.num_pictures(row)
        if prompt is None and pictures:
            raise ValueError(f"{pictures} images, but no {self.cfg.prompt_key!r} (data.prompt_key) to place them in")
        return None if prompt is None else with_image_text(prompt, pictures)

    def _in_steps(self, row: Row, steps: list[str], encoder: Encoder) -> tuple[RenderedPrompt, list[RenderedPrompt]]:
        """Returns the prompt, up to the start of the answer, and each step with its separator."""
        cfg = self.cfg
        assert isinstance(cfg, RewardDataConfig)
        prompt = row[cfg.prompt_key]
        start = encoder.text_of(prompt if cfg.chat_template else with_image_text(prompt, encoder.num_pictures(row)))
        if cfg.chat_template:
            before = conversation(prompt, row, cfg, encoder.num_pictures(row))
            start = encoder.conversation(before, read_template_variables(row, cfg), is_whole=False)
        return start, [encoder.answer_of(step + cfg.step_separator) for step in steps]
