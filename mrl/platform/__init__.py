"""Hardware and library adaptation: the only package that touches `torch.cuda` or changes other libraries.

Call `install()` before the first `import megatron.core`, in training processes only.
"""

from mrl.platform.adaptations import applied, check_switches, install
from mrl.platform.determinism import enable_determinism, is_deterministic
from mrl.platform.fake_rank import fake_rank
from mrl.platform.features import Feature, features
from mrl.platform.fp8 import fp8_problem, fp8_recipes
from mrl.platform.fused import apex_usable, transformer_engine_problem, transformer_engine_usable, triton_usable
from mrl.platform.gpu_health import GpuHealth, GpuTimeout, gpu_health
from mrl.platform.host_limit import free_host_memory
from mrl.platform.megatron_versions import submodules
from mrl.platform.memory import (
    peak_memory_bytes,
    release_cached_memory,
    reset_peak_memory,
)
from mrl.platform.offload_buffer import OffloadBuffer, host_bytes
from mrl.platform.optimizer_state import prime_adam, separate_step_tensors
from mrl.platform.process import (
    WorldError,
    backend,
    device,
    device_uuid,
    gpu_count,
    gpu_names,
    init_process_group,
    is_built_for_gpus,
    release_shared_memory,
    single_process_world,
    synchronize,
    use_device,
)
from mrl.platform.profiling import dump_memory_snapshot, nsys_capture, nvtx_range, record_memory_history
from mrl.platform.random_state import random_state, restore_random_state
from mrl.platform.registry import REGISTRY, Adaptation
from mrl.platform.speed import busy_seconds, cpu_gflops, pass_timers, probe_seconds
from mrl.platform.transfers import to_device, to_host

__all__ = [
    "REGISTRY",
    "Adaptation",
    "Feature",
    "GpuHealth",
    "GpuTimeout",
    "OffloadBuffer",
    "WorldError",
    "apex_usable",
    "applied",
    "backend",
    "enable_determinism",
    "busy_seconds",
    "check_switches",
    "release_shared_memory",
    "device",
    "dump_memory_snapshot",
    "nsys_capture",
    "nvtx_range",
    "record_memory_history",
    "device_uuid",
    "features",
    "fp8_problem",
    "fp8_recipes",
    "free_host_memory",
    "cpu_gflops",
    "gpu_count",
    "gpu_health",
    "gpu_names",
    "host_bytes",
    "fake_rank",
    "init_process_group",
    "single_process_world",
    "install",
    "is_built_for_gpus",
    "is_deterministic",
    "pass_timers",
    "peak_memory_bytes",
    "prime_adam",
    "probe_seconds",
    "random_state",
    "release_cached_memory",
    "reset_peak_memory",
    "restore_random_state",
    "synchronize",
    "to_device",
    "to_host",
    "transformer_engine_problem",
    "transformer_engine_usable",
    "triton_usable",
    "separate_step_tensors",
    "submodules",
    "use_device",
]
