"""Peak rates of GPUs, from their makers, and the assumed share of them that a run reaches."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar

GIB = 1 << 30
CAPABILITIES = {"a100": (8, 0), "h100": (9, 0), "h200": (9, 0), "b200": (10, 0)}  # NVIDIA's list of CUDA GPUs


@dataclass(frozen=True)
class Chip:
    """GPU and its share of its node.

    capability: CUDA compute capability; memory: bytes; bf16, fp8: dense floating-point operations a second
    (fp8 None: unsupported); hbm, nvlink, network, pcie: bytes a second, the last three one way; device: its driver's
    name after "NVIDIA "
    """

    name: str
    capability: tuple[int, int]
    memory: int
    bf16: float
    fp8: float | None
    hbm: float
    nvlink: float
    network: float
    pcie: float
    device: str = ""

    @property
    def is_gpu(self) -> bool:
        return self.memory > 0


def _chip(
    name: str, device: str, gib: float, tflops: float, fp8: float | None, hbm: float, nvlink: float, net: float
) -> Chip:
    """hbm in TB/s; nvlink in GB/s, both ways together as in the data sheets; net in Gbit/s a GPU."""
    pcie = 32e9 if name.startswith("a100") else 64e9  # PCI-SIG: 16 lanes of generation 4, and of 5
    tera = fp8 * 1e12 if fp8 is not None else None
    kind, nbytes = CAPABILITIES[name[:4]], int(gib * GIB)
    return Chip(name, kind, nbytes, tflops * 1e12, tera, hbm * 1e12, nvlink * 1e9 / 2, net * 1e9 / 8, pcie, device)


CHIPS = {  # data sheets' figures of SXM modules, without sparsity (half of the printed figure with sparsity)
    chip.name: chip
    for chip in (
        # NVIDIA A100 80GB data sheet: 312 TFLOPS bf16, 2,039 GB/s, NVLink 600 GB/s. DGX A100: 8 x 200 Gb/s InfiniBand
        _chip("a100-80g", "A100-SXM4-80GB", 80, 312, None, 2.039, 600, 200),
        # NVIDIA A100 40GB data sheet: as above, 1,555 GB/s
        _chip("a100-40g", "A100-SXM4-40GB", 40, 312, None, 1.555, 600, 200),
        # NVIDIA H100 data sheet: 1,979 TFLOPS bf16 and 3,958 fp8 with sparsity, 3.35 TB/s, NVLink 900 GB/s. DGX H100:
        # 8 x 400 Gb/s ConnectX-7
        _chip("h100-80g", "H100 80GB HBM3", 80, 989.5, 1979, 3.35, 900, 400),
        # NVIDIA H200 data sheet: the H100's arithmetic, 141 GB, 4.8 TB/s
        _chip("h200", "H200", 140.4, 989.5, 1979, 4.8, 900, 400),
        # NVIDIA HGX B200 data sheet, an eighth of it: 36 PFLOPS bf16 and 72 fp8 with sparsity, 1.44 TB, 8 TB/s a GPU,
        # NVLink 1.8 TB/s; 8 x 400 Gb/s
        _chip("b200", "B200", 179, 2250, 4500, 8.0, 1800, 400),
    )
}
DEFAULT = "h100-80g"
# ranks and engines compute on CPUs: their bytes are counted, seconds are not
NO_GPU = Chip("none", (0, 0), 0, 0, None, 0, 0, 0, 0)
KINDS = CHIPS | {NO_GPU.name: NO_GPU}


def chip_named(device: str) -> Chip | None:
    """Returns the GPU with this driver name, or None.

    Other form factors have similar names (H100 PCIe, H200 NVL, GH200, a part of a GPU), and other limits.
    """
    return next((chip for chip in CHIPS.values() if chip.device == device.removeprefix("NVIDIA ")), None)


@dataclass(frozen=True)
class Assumptions:
    """Values not measured with mrl: reached shares of peak rates, and memory overheads."""

    IN_BYTES: ClassVar = ("trainer_context", "communicators", "engine_context", "engine_workspace")

    matmul_share: float = 0.45  # of bf16 arithmetic, in training and log-prob passes, attention included
    # of fp8 arithmetic, casts included: products take 1 / 1.6 of bf16's seconds, the bar of `make test-gpu STAGES=fp8`
    fp8_share: float = 0.36
    prefill_share: float = 0.40  # of bf16 arithmetic, during prefill
    hbm_share: float = 0.70  # of memory bandwidth, during decoding and optimizer steps
    link_share: float = 0.75  # of NVLink, network and PCIe
    decode_overhead_s: float = 3e-3  # a decode step's launches and sampling
    hop_s: float = 15e-6  # an all-reduce of few bytes
    mean_response_share: float = 0.5  # of rollout.sampling.max_new_tokens
    mean_prompt_share: float = 0.5  # of data.max_prompt_tokens
    experts_skew: float = 1.2  # busiest rank's routed tokens, and time, over the mean
    trainer_context: float = 1.0 * GIB  # bytes: CUDA context and libraries of a rank
    communicators: float = 1.5 * GIB  # bytes: NCCL's buffers of a rank's groups
    engine_context: float = 1.0 * GIB  # bytes: CUDA context and NCCL of an engine's process, kept while it sleeps
    engine_workspace: float = 2.0 * GIB  # bytes: CUDA graphs and activations of an engine
    fragments_share: float = 0.05  # of the trainer's tensor memory, lost to fragmentation
    disk: float = 2e9  # bytes a second of a node's checkpoint writes
    spare_share: float = 0.08  # of a GPU's memory, left free by --search
    measured: tuple[str, ...] = ()  # names of the values above that were measured on the run's data

    def without_gpu(self) -> Assumptions:
        """Returns the assumptions without the memory overheads of GPUs and their engines."""
        overheads: dict[str, Any] = dict.fromkeys(("fragments_share", *self.IN_BYTES), 0.0)
        return replace(self, **overheads)

    def rows(self) -> list[tuple[str, str]]:
        """Returns name and value of all but those measured, bytes in GiB."""
        values = [item for item in vars(self).items() if item[0] not in ("measured", *self.measured)]
        return [(name, f"{value / GIB:g} GiB" if name in self.IN_BYTES else f"{value:g}") for name, value in values]


@dataclass(frozen=True)
class Cluster:
    """gpus: of the trainer, shared by engines or not. per_node: GPUs of a node, all with NVLink."""

    chip: Chip
    gpus: int
    per_node: int = 8

    @property
    def nodes(self) -> int:
        return -(-self.gpus // self.per_node)
