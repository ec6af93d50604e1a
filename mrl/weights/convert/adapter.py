"""Export of adapters from a run's checkpoint into a directory in PEFT's format."""

from __future__ import annotations

from pathlib import Path

from safetensors.torch import save_file

from mrl.directories import Staging
from mrl.families.adapters import adapter_table, lora_of
from mrl.families.peft import PREFIX
from mrl.weights.disk.adapter_files import WEIGHTS, write_config
from mrl.weights.disk.digest import file_digests
from mrl.weights.disk.megatron_dirs import open_megatron
from mrl.weights.disk.megatron_source import MegatronCheckpoint
from mrl.weights.disk.stored_names import UnstackedNames
from mrl.weights.model.export import Describe


def adapter_of_run(
    path: Path, target: Path, part: str | None, model_files: Path | None, describe: Describe | None = None
) -> int:
    """Writes `target`, all or nothing, and returns the number of tensors.

    path: a run's checkpoint, step_N; part, model_files: as in `open_megatron`; describe: as in `save_hf`. Raises
    WeightError.
    """
    with open_megatron(path, part, model_files, adapters=True) as model:
        assert model.adapters is not None
        lora = lora_of(model.adapters)
        table = adapter_table(model.arch, model.role, lora)
        checkpoint = MegatronCheckpoint(model.weights, UnstackedNames(), model.arch, table)
        tensors = {
            PREFIX + name: checkpoint.source(name, shape)[:].contiguous()
            for row in table.values()
            for name, shape in zip(row.hf, row.shapes, strict=True)
        }
        base = model.adapters.get("base", ""), model.model_files.name
    staging = Staging(target, sum(tensor.nbytes for tensor in tensors.values()))
    staging.begin()
    try:
        save_file(tensors, staging.directory / WEIGHTS, metadata={"format": "pt"})
        write_config(staging.directory, base[1], model.arch, model.role, lora, base[0])
        if describe is not None:
            describe(staging.directory, file_digests([staging.directory / WEIGHTS]))
        staging.commit()
    finally:
        staging.end()
    return len(tensors)
