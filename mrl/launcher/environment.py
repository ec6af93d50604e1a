"""What ranks find in their environment unless the user has set it."""

from __future__ import annotations

FOR_RANKS = {
    "OMP_NUM_THREADS": "1",
    "CUDA_DEVICE_MAX_CONNECTIONS": "1",  # see mrl/platform/adaptations.py, which may come too late for a driver
}
