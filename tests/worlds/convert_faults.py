"""Run in one process: conversions that must fail, and the files that they leave.

Usage: convert_faults.py WORK MODEL PICKLED FUSED MOE. Prints one JSON object per case: {"case": ..., ...}.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import pickle
import resource
import shutil
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from mrl import platform

platform.install()

from safetensors.torch import load_file, save_file  # noqa: E402

from mrl.config.model_dirs import read_converted  # noqa: E402
from mrl.parallel import Meshes  # noqa: E402
from mrl.weights.compare.verdict import compare_models  # noqa: E402
from mrl.weights.convert.convert import ConvertOptions, hf_to_megatron, megatron_to_hf  # noqa: E402
from mrl.weights.errors import WeightError  # noqa: E402

SMALL = ConvertOptions(workers=1, bucket_bytes=5_000, max_file_bytes=100_000)
SHARDED = "release/__0_0.distcp"


class Faults:
    def __init__(self, work: Path, model: Path, meshes: Meshes) -> None:
        self.work, self.model, self.meshes, self.count = work, model, meshes, 0

    def fresh(self) -> Path:
        """Returns a new folder for one conversion."""
        self.count += 1
        path = self.work / str(self.count)
        path.mkdir()
        return path

    def hf(self, change: Callable[[dict[str, torch.Tensor]], Any], path: Path | None = None) -> Path:
        """Returns a copy of the model with changed tensors."""
        copy = self.fresh() / "model"
        shutil.copytree(path or self.model, copy)
        tensors = load_file(copy / "model.safetensors")
        change(tensors)
        save_file(tensors, copy / "model.safetensors", metadata={"format": "pt"})
        return copy

    def megatron(self, change: Callable[[Path], Any] = lambda path: None, options: ConvertOptions = SMALL) -> Path:
        """Returns a converted model that is changed afterwards, with a manifest that matches the change."""
        target = self.fresh() / "converted"
        hf_to_megatron(self.model, target, options, self.meshes)
        change(target)
        manifest = json.loads((target / "complete").read_text())
        manifest["files"] = {name: (target / name).stat().st_size for name in manifest["files"]}
        (target / "complete").write_text(json.dumps(manifest))
        return target

    def to_megatron(self, source: Path, options: ConvertOptions = SMALL, target: Path | None = None) -> dict[str, Any]:
        return self._attempt(hf_to_megatron, source, options, target)

    def to_hf(self, source: Path, options: ConvertOptions = SMALL, target: Path | None = None) -> dict[str, Any]:
        return self._attempt(megatron_to_hf, source, options, target)

    def _attempt(
        self, convert: Callable[..., Any], source: Path, options: ConvertOptions, to: Path | None
    ) -> dict[str, Any]:
        target = to or self.fresh() / "target"
        error = ""
        try:
            convert(source, target, options, self.meshes)
        except WeightError as raised:
            error = str(raised)
        left = sorted(path.name for path in target.parent.iterdir() if path.name != "model")
        return {"error": error, "left": left, "target": str(target)}

    def verdict(self, hf: Path, megatron: Path, **more: Any) -> dict[str, Any]:
        found = compare_models(hf, megatron, self.meshes, **more).as_dict()
        different = [text for group in found["groups"] for text in group["different"]]
        return {"same": found["same"], "different": different, "problems": found["problems"], "logits": found["logits"],
                "dtypes": sorted({tuple(pair) for group in found["groups"] for pair in group["dtypes"]})}  # fmt: skip


def report(case: str, **values: Any) -> None:
    print(json.dumps({"case": case, **values}), flush=True)


def leftovers(faults: Faults) -> None:
    def change(tensors: dict[str, torch.Tensor]) -> None:
        del tensors["model.layers.1.mlp.up_proj.weight"]
        tensors["model.layers.9.mlp.up_proj.weight"] = torch.zeros(3)
        tensors["model.norm.weight"] = torch.zeros(5)

    report("leftovers to megatron", **faults.to_megatron(faults.hf(change)))

    def change_metadata(path: Path) -> None:
        content = pickle.loads((path / "release/.metadata").read_bytes())
        entries = content.state_dict_metadata
        entries["decoder.layers.surplus.weight"] = entries["decoder.final_layernorm.weight"]
        places = {index.fqn: place for index, place in content.storage_data.items()}
        index = next(index for index in content.storage_data if index.fqn == "decoder.final_layernorm.weight")
        content.storage_data[replace_key(index, "decoder.layers.surplus.weight")] = places[index.fqn]
        del entries["decoder.layers.mlp.linear_fc2.weight"]
        entries["decoder.layers.self_attention.linear_qkv.weight"].chunks.pop()
        (path / "release/.metadata").write_bytes(pickle.dumps(content))

    for value in ("nan", "inf"):
        bad = faults.hf(lambda t, v=value: t["model.layers.1.self_attn.k_proj.weight"].view(-1)[-3:].fill_(float(v)))
        report(f"{value} to megatron", **faults.to_megatron(bad))
    large = faults.hf(lambda tensors: tensors["model.norm.weight"].fill_(1e6))
    report("too large for float16", **faults.to_megatron(large, replace(SMALL, dtype=torch.float16)))
    untied = faults.hf(lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"] + 1}))
    report("untied to megatron", **faults.to_megatron(untied))
    report("leftovers to hf", **faults.to_hf(faults.megatron(change_metadata)))


def replace_key(index: Any, key: str) -> Any:
    return type(index)(key, index.offset, index.index)


def cut_off(faults: Faults) -> None:
    def half(path: Path) -> None:
        path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])

    broken = faults.hf(lambda tensors: None)
    half(broken / "model.safetensors")
    report("truncated safetensors", **faults.to_megatron(broken))
    truncated = faults.megatron()
    half(truncated / SHARDED)
    report("truncated distcp", **faults.to_hf(truncated))
    report("nothing there", **faults.to_hf(faults.fresh(), replace(SMALL, model_files=faults.model)))
    unmarked = faults.megatron()
    (unmarked / "complete").unlink()
    report("no marker", **faults.to_hf(unmarked))
    garbled = faults.megatron(lambda path: (path / SHARDED).write_bytes(bytes((path / SHARDED).stat().st_size)))
    report("garbled distcp", **faults.to_hf(garbled))
    no_metadata = faults.megatron(lambda path: (path / "release/.metadata").write_bytes(b"no"))
    report("garbled metadata", **faults.to_hf(no_metadata))


class Payload:
    """Runs code when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return Path.touch, (self.path,)


def security(faults: Faults, pickled: Path) -> None:
    report("pickle refused", **faults.to_megatron(pickled))
    allowed = replace(SMALL, allow_pickle=True)
    result = faults.to_megatron(pickled, allowed)
    report("pickle allowed", **result, verdict=faults.verdict(faults.model, Path(result["target"]), skip_logits=True))
    bad = faults.fresh() / "model"
    shutil.copytree(pickled, bad)
    torch.save({"a": Payload(faults.work / "ran")}, bad / "pytorch_model.bin")
    report("code in a pickle", **faults.to_megatron(bad, allowed), ran=(faults.work / "ran").exists())
    code = pickle.dumps(Payload(faults.work / "ran"))
    evil = faults.megatron(lambda path: (path / "release/.metadata").write_bytes(code))
    report("code in metadata", **faults.to_hf(evil), ran=(faults.work / "ran").exists())

    def outside(path: Path) -> None:
        shutil.copyfile(path / SHARDED, path.parent / "outside.distcp")
        content = pickle.loads((path / "release/.metadata").read_bytes())
        for place in content.storage_data.values():
            place.relative_path = "../../outside.distcp"
        (path / "release/.metadata").write_bytes(pickle.dumps(content))

    report("metadata leaves", **faults.to_hf(faults.megatron(outside)))
    index = faults.hf(lambda tensors: None)
    (index / "model.safetensors").rename(index.parent / "outside.safetensors")
    where = dict.fromkeys(load_file(faults.model / "model.safetensors"), "../outside.safetensors")
    (index / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))
    report("index leaves", **faults.to_megatron(index))


@contextlib.contextmanager
def file_limit(size: int) -> Iterator[None]:
    """Limits the size of files that this process writes, as a full disk would."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def disk(faults: Faults) -> None:
    whole = faults.megatron()
    real = shutil.disk_usage
    shutil.disk_usage = lambda path: real(path)._replace(free=1000)  # type: ignore[assignment]
    report("no room to megatron", **faults.to_megatron(faults.model))
    report("no room to hf", **faults.to_hf(whole))
    shutil.disk_usage = real
    with file_limit(60_000):
        report("disk fills to megatron", **faults.to_megatron(faults.model))
        report("disk fills to hf", **faults.to_hf(whole))
        report("disk fills in a large block", **faults.to_megatron(faults.model, replace(SMALL, bucket_bytes=1 << 20)))
        report("disk fills in workers", **faults.to_megatron(faults.model, replace(SMALL, workers=2)))


def targets(faults: Faults) -> None:
    taken = faults.fresh() / "target"
    taken.mkdir()
    (taken / "thesis.txt").touch()
    report("taken", **faults.to_megatron(faults.model, target=taken), kept=(taken / "thesis.txt").exists())
    busy = faults.fresh() / "target"
    with (busy.parent / ".target.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        report("busy", **faults.to_megatron(faults.model, target=busy))
    stale = faults.fresh() / "target"
    shutil.copytree(faults.model, stale.with_name(".target.partial"))
    report("stale", **faults.to_megatron(faults.model, target=stale), files=sorted(os.listdir(stale)))


def dtypes(faults: Faults) -> None:
    half = replace(SMALL, dtype=torch.bfloat16)
    cast = faults.to_megatron(faults.model, half)
    report("cast", **cast, verdict=faults.verdict(faults.model, Path(cast["target"])))
    back = faults.to_hf(Path(cast["target"]))
    tensors = load_file(next(Path(back["target"]).glob("model-00001*")))
    report("cast back", config=json.loads((Path(back["target"]) / "config.json").read_text())["dtype"],
           dtypes=sorted({str(tensor.dtype) for tensor in tensors.values()}))  # fmt: skip

    def mixed(tensors: dict[str, torch.Tensor]) -> None:
        name = "model.layers.1.mlp.up_proj.weight"
        tensors[name] = tensors[name].bfloat16()

    model = faults.hf(mixed)
    report("mixed", **faults.to_megatron(model))
    report("mixed, one chosen", **faults.to_megatron(model, half))


def verdicts(faults: Faults) -> None:
    def flip(path: Path) -> None:
        file = path / SHARDED
        data = bytearray(file.read_bytes())
        row = load_file(faults.model / "model.safetensors")["model.layers.1.mlp.down_proj.weight"][3].numpy().tobytes()
        at = data.find(row)
        data[at] ^= 1
        file.write_bytes(bytes(data))

    report("a flipped bit", **faults.verdict(faults.model, faults.megatron(flip)))

    def other_rope(path: Path) -> None:
        config = json.loads((path / "config.json").read_text())
        config["rope_parameters"]["rope_theta"] = 10.0
        (path / "config.json").write_text(json.dumps(config))

    report("other rope", **faults.verdict(faults.model, faults.megatron(other_rope)))
    twice = faults.hf(lambda tensors: tensors.update({"model.extra": torch.zeros(2)}))
    report("surplus", **faults.verdict(twice, faults.megatron()))


def forms(faults: Faults, fused: Path, moe: Path) -> None:
    """Converts fused experts (transformers' own form), and converts with several workers."""
    result = faults.to_megatron(fused)
    report("fused", **result, verdict=faults.verdict(moe, Path(result["target"]), skip_logits=True))
    several = replace(SMALL, workers=3)
    there = faults.to_megatron(moe, several)
    here = faults.to_hf(Path(there["target"]), several)
    files = sorted(name for name in read_converted(there["target"])["files"] if name.endswith(".distcp"))
    verdict = faults.verdict(Path(here["target"]), Path(there["target"]))
    one, two = (load_all(path) for path in (moe, Path(here["target"])))
    equal = one.keys() == two.keys() and all(torch.equal(one[name], two[name]) for name in one)
    report("workers", files=files, verdict=verdict, equal=equal)


def load_all(path: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for file in path.glob("*.safetensors") for name, tensor in load_file(file).items()}


def memory(faults: Faults) -> None:
    """Reports the peak memory above the initial one while a model of 84 MB is converted in buckets of 1 MB."""
    rows = 320_000
    big = faults.hf(lambda tensors: tensors.update({"model.embed_tokens.weight": torch.ones(rows, 64)}))
    config = json.loads((big / "config.json").read_text())
    (big / "config.json").write_text(json.dumps({**config, "vocab_size": rows}))
    options = ConvertOptions(bucket_bytes=1 << 20)
    faults.to_hf(faults.megatron(options=options))  # imports and caches must not count as the model's memory
    grown = []
    target = faults.fresh() / "target"
    for run in (lambda: hf_to_megatron(big, target, options, faults.meshes),
                lambda: megatron_to_hf(target, target.with_name("back"), options, faults.meshes)):  # fmt: skip
        platform.reset_peak_memory()
        before = platform.peak_memory_bytes()
        run()
        grown.append(platform.peak_memory_bytes() - before)
    report("memory", model=rows * 64 * 4, grown=grown)


def main() -> None:
    work, model, pickled, fused, moe = map(Path, sys.argv[1:])
    platform.init_process_group(120)
    faults = Faults(work, model, Meshes(120))
    memory(faults)
    leftovers(faults)
    cut_off(faults)
    security(faults, pickled)
    disk(faults)
    targets(faults)
    dtypes(faults)
    verdicts(faults)
    forms(faults, fused, moe)
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
