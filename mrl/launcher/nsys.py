"""The command that runs a rank under NVIDIA Nsight Systems."""

from __future__ import annotations

import shutil
from pathlib import Path

from mrl.launcher.logs import LaunchError

# The ranks open and close the capture (mrl.platform.profiling); `repeat` lets them go on after it, with one report a
# step. Sampling of the CPU is off: it costs more than it tells of a GPU's step.
GPU = ("--trace=cuda,nvtx", "--sample=none", "--cpuctxsw=none", "--capture-range=cudaProfilerApi")
GPU_END = ("--capture-range-end=repeat", "--cuda-graph-trace=node")
CPU = ("--trace=osrt", "--sample=process-tree")  # no ranges: NVTX needs CUDA


def nsys_command(log_dir: Path, on_gpu: bool) -> list[str]:
    """Returns the words before a rank's own command. Its reports are LOG_DIR/nsys_rank_N*.nsys-rep.

    Raises LaunchError if nsys is not installed.
    """
    if shutil.which("nsys") is None:
        raise LaunchError(
            "run.profile.tool: nsys is not on PATH: install NVIDIA Nsight Systems (nsight-systems-cli), or use tool: "
            "torch (mrl profile without --nsys)"
        )
    output = f"--output={log_dir.absolute()}/nsys_rank_%q{{RANK}}"
    return ["nsys", "profile", *((*GPU, *GPU_END) if on_gpu else CPU), "--force-overwrite=true", output]
