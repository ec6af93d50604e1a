"""The rows of a run that learns from preferences."""

from __future__ import annotations

from mrl.config.schema import PreferencesConfig
from mrl.data import PreferenceDataset, load_eyes, load_tokenizer, preference_notes
from mrl.data.picture_store import PictureStore
from mrl.observe import Recorder, SilentRecorder


def read_preferences(
    cfg: PreferencesConfig, recorder: Recorder | SilentRecorder
) -> tuple[PreferenceDataset, PreferenceDataset | None]:
    """(what is learnt from, what is held out); notes say what was corrected, left out or cut. Raises DataError, or
    TokenizerError, for what cannot be used."""
    use, tokenizer = (
        cfg.data_uses()["data"],
        load_tokenizer(cfg.model.path, cfg.model.eos_token, cfg.model.chat_template),
    )
    assert use.preferences is not None
    eyes, rows = load_eyes(cfg.model.path, cfg.data), 0
    found: list[PreferenceDataset | None] = []
    for key, sources in (("data.train", cfg.data.train), ("data.validation", cfg.data.validation)):
        data = None
        if sources is not None:
            data = PreferenceDataset(sources, cfg.data, tokenizer, use.preferences, use.margins, use.cuts, eyes, rows)
            rows += sum(len(source.rows) for source in data.sources)
            for line in preference_notes(key, data):
                recorder.note(line)
        found.append(data)
    train, held_out = found
    assert train is not None
    return train, held_out


def pictures_of(train: PreferenceDataset, held_out: PreferenceDataset | None) -> PictureStore | None:
    """Of all rows that `read_preferences` has read; None: of a model that sees none."""
    sources = [*train.sources, *(held_out.sources if held_out is not None else ())]
    return None if train.eyes is None else PictureStore(sources, train.eyes)
