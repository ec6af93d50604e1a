"""Environment variables of ranks, and of processes that import for them, unless the user sets them."""

from __future__ import annotations

FOR_RANKS = {
    "OMP_NUM_THREADS": "1",
    "CUDA_DEVICE_MAX_CONNECTIONS": "1",  # see mrl/platform/adaptations.py, which may run after the driver has started
}
FOR_FORK_SERVERS = {  # set before a fork server imports, since the imports would start threads and CUDA
    "OMP_NUM_THREADS": "1",
    "PYTORCH_NVML_BASED_CUDA_CHECK": "1",
}
