"""Imports of SGLang's CPU form, for the fork server of engines."""

import importlib
import os
import sys

import torch

from mrl.inference.launch import keep_memory
from mrl.inference.sglang.command import SHIM, cpu_environment

os.environ |= cpu_environment(tensor=1, threads=1)
keep_memory()
torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
sys.path.insert(0, str(SHIM))
importlib.import_module("mrl_cpu_engine").install()

import sglang.srt.entrypoints.http_server  # noqa: E402, F401
