"""Exports of a run: the actor as a Hugging Face directory and its adapters in PEFT format, each with a model card."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from mrl.cards import WeightsOrigin, write_run_card
from mrl.config.schema import Config
from mrl.learner import Learner
from mrl.parallel import gather, rank, world_size
from mrl.trainers.shared.phases import Phases
from mrl.weights.disk.digest import file_digests
from mrl.weights.disk.draft_layers import draft_note
from mrl.weights.disk.model_files import write_prompt_files
from mrl.weights.model.export import Describe, save_hf
from mrl.weights.model.save_adapter import save_adapter


class Exports:
    """Exports of one run. All methods are collective; `step` is the step of the weights.

    config: configuration as stored in checkpoints; ends: stop tokens that the actor learns, on rank 0; part: the
    actor's name in checkpoints
    """

    def __init__(
        self,
        cfg: Config,
        phase: Phases,
        config: Mapping[str, Any],
        actor: Learner,
        end_tokens: Collection[int] = (),
        part: str = "actor",
    ) -> None:
        self._model, self._phase, self._config, self._actor = cfg.model.path, phase, config, actor
        self._template, self._eos, self._ends = cfg.model.chat_template, cfg.model.eos_token, end_tokens
        self._drafts = None if cfg.model.from_scratch else Path(cfg.model.path)
        self._allow_pickle, self._part = cfg.model.allow_pickle, part

    def of_step(self, step: int) -> None:
        """Writes RUN_DIR/adapter_step_N if the actor has adapters, else RUN_DIR/hf_step_N."""
        if self._actor.adapters is not None:
            self.adapter(f"adapter_step_{step}", step)
        else:
            self.whole(f"hf_step_{step}", step)

    def whole(self, name: str, step: int) -> None:
        """Writes a complete Hugging Face directory to RUN_DIR/name, with adapters merged."""
        self._phase.memory.begin("export")
        target = self._phase.run_dir / name
        save_hf(
            self._actor.exporter,
            self._model,
            target,
            overwrite=True,
            drafts=self._drafts,
            allow_pickle=self._allow_pickle,
            describe=self._describe(target, step),
        )

    def adapter(self, name: str, step: int) -> None:
        """Writes the adapters alone to RUN_DIR/name; does nothing if the actor has none."""
        actor, target = self._actor, self._phase.run_dir / name
        if actor.adapters is None:
            return
        self._phase.memory.begin("export")
        actor.adapters.activate()
        save_adapter(
            *(actor.bare, actor.arch, actor.mesh),
            actor.adapters.spec,
            target,
            base_name=Path(self._model).name,
            base_digest=actor.adapters.base,
            overwrite=True,
            describe=self._describe(target, step),
        )

    def _describe(self, target: Path, step: int) -> Describe:
        origin = WeightsOrigin(self._phase.run_dir, self._config, step, self._part)
        base = _digests(origin.base_files())

        def describe(export: Path, digests: dict[str, str]) -> None:
            write_prompt_files(export, Path(self._model), self._template, self._ends, self._eos)
            if (export / "config.json").is_file() and (note := draft_note(Path(self._model), export)):
                self._phase.recorder.note(f"{target}: {note}")  # adapters have no config.json
            if note := write_run_card(origin, export, target, digests, base):
                self._phase.recorder.note(note)

        return describe


class AdapterExports:
    """Exports of a run of several adapters: each one's adapter, in RUN_DIR/adapters/NAME. No weights are merged."""

    def __init__(
        self,
        cfg: Config,
        phase: Phases,
        config: Mapping[str, Any],
        learners: Mapping[str, Learner],
        end_tokens: Mapping[str, Collection[int]],
    ) -> None:
        """learners: by their names in checkpoints, which are folders of the run directory too, as are end_tokens."""
        self._each = {
            name: Exports(cfg, phase, config, learner, end_tokens.get(name, ()), part=name)
            for name, learner in learners.items()
        }

    def of_step(self, step: int) -> None:
        """Writes RUN_DIR/adapters/NAME/adapter_step_N."""
        self.adapter(f"adapter_step_{step}", step)

    def whole(self, name: str, step: int) -> None:
        """Writes nothing: `adapter` does."""

    def adapter(self, name: str, step: int) -> None:
        for part, exports in self._each.items():
            exports.adapter(f"{part}/{name}", step)


def _digests(files: list[Path]) -> dict[str, str]:
    """Digests of all files, each read by one rank; empty if a file cannot be read."""
    try:
        mine = file_digests(files[rank() :: world_size()])
    except OSError:
        mine = {}
    found = {name: digest for part in gather(mine) for name, digest in part.items()}
    return found if len(found) == len(files) else {}
