"""`trainer: sft`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from mrl.config.checks.base import Archs
from mrl.config.checks.layout import check_shares
from mrl.config.derived import Machine
from mrl.config.problems import Problem
from mrl.config.sections.data import SFTBatchConfig
from mrl.config.trainers.base import Config, DataUse


class SFTConfig(Config):
    """`trainer: sft`: supervised fine-tuning on prompt + answer; the loss is the mean over answer tokens."""

    trainer: Literal["sft"]  # supervised fine-tuning
    batch: SFTBatchConfig

    def data_uses(self) -> dict[str, DataUse]:
        return {"data": DataUse(self.data, self.batch.samples_per_step)}

    def summary(self) -> list[tuple[str, str]]:
        return [("step", f"{self.batch.samples_per_step} samples, 1 update")]


def check(cfg: SFTConfig, archs: Archs, machine: Machine) -> Iterator[Problem]:
    yield from check_shares(cfg, machine, "batch.samples_per_step", cfg.batch.samples_per_step)
