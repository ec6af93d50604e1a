"""Export of a model's adapters to a directory that PEFT and SGLang load."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from mrl.families import ModelArch
from mrl.families.adapters import LoRA
from mrl.families.peft import PREFIX
from mrl.files import sync
from mrl.parallel import Mesh
from mrl.weights.agreement import WeightAgreement, raise_together
from mrl.weights.disk.adapter_files import WEIGHTS, write_config
from mrl.weights.disk.digest import file_digests
from mrl.weights.disk.staging import staged
from mrl.weights.model.export import Describe, Exporter, plan_files, write_weights


def save_adapter(
    chunks: Sequence[nn.Module],
    arch: ModelArch,
    mesh: Mesh,
    lora: LoRA,
    target: Path,
    *,
    base_name: str,
    base_digest: str,
    overwrite: bool = False,
    describe: Describe | None = None,
) -> None:
    """Writes `target`, all or nothing, on a file system that all ranks share; collective over the world. A critic's
    score head is saved beside its adapters.

    base_name, base_digest: of the base weights; describe: as in `save_hf`
    Raises WeightError on every rank.
    """
    exporter = Exporter(chunks, arch, mesh, lora=lora)
    metas = exporter.metas()
    files = plan_files(metas, sys.maxsize)
    what = f"writing {target} failed"
    with staged(target, 2 * sum(meta.nbytes for meta in metas), overwrite=overwrite) as staging:

        def complete() -> None:
            whole: dict[str, Tensor] = {}
            for file in files:
                part = staging.directory / file.name
                whole |= {PREFIX + name: tensor for name, tensor in load_file(part).items()}
                part.unlink()
            save_file(whole, staging.directory / WEIGHTS, metadata={"format": "pt"})
            sync(staging.directory / WEIGHTS)
            write_config(staging.directory, base_name, arch, exporter.role, lora, base_digest)
            if describe is not None:
                describe(staging.directory, file_digests([staging.directory / WEIGHTS]))
            staging.commit()

        raise_together(write_weights(exporter, files, staging.directory), what)
        WeightAgreement().on_main(what, complete)
