"""What ranks, and who imports for them, find in their environment unless the user has set it."""

from __future__ import annotations

FOR_RANKS = {
    "OMP_NUM_THREADS": "1",
    "CUDA_DEVICE_MAX_CONNECTIONS": "1",  # see mrl/platform/adaptations.py, which may come too late for a driver
}
FOR_COPIES = {  # before the imports of a process that is copied: else they start threads, and CUDA
    "OMP_NUM_THREADS": "1",
    "PYTORCH_NVML_BASED_CUDA_CHECK": "1",
}
