"""Preference data of a run."""

from __future__ import annotations

from mrl.config.schema import PreferencesConfig
from mrl.data import PreferenceDataset, preference_notes
from mrl.data.image_store import ImageStore
from mrl.data.open_data import open_preferences
from mrl.observe import Recorder, SilentRecorder


def read_preferences(
    cfg: PreferencesConfig, recorder: Recorder | SilentRecorder
) -> tuple[PreferenceDataset, PreferenceDataset | None]:
    """Returns (training rows, held-out rows or None).

    Notes report rows that were corrected, left out or cut. Raises DataError or TokenizerError for unusable data.
    """
    found = open_preferences(cfg)
    for key, data in found.items():
        for line in preference_notes(key, data):
            recorder.note(line)
    return found["data.train"], found.get("data.validation")


def pictures_of(train: PreferenceDataset, held_out: PreferenceDataset | None) -> ImageStore | None:
    """Pictures of all rows that `read_preferences` returned; None for a text-only model."""
    sources = [*train.sources, *(held_out.sources if held_out is not None else ())]
    return None if train.image_processor is None else ImageStore(sources, train.image_processor)
