"""The rows of a run that learns from preferences."""

from __future__ import annotations

from mrl.config.schema import PreferencesConfig
from mrl.data import PreferenceDataset, load_tokenizer, preference_notes
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
    found: list[PreferenceDataset | None] = []
    for key, sources in (("data.train", cfg.data.train), ("data.validation", cfg.data.validation)):
        data = None
        if sources is not None:
            data = PreferenceDataset(sources, cfg.data, tokenizer, use.preferences, use.margins, use.cuts)
            for line in preference_notes(key, data):
                recorder.note(line)
        found.append(data)
    train, held_out = found
    assert train is not None
    return train, held_out
