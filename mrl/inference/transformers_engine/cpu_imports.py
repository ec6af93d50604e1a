"""Imports of the transformers engine, some of which it makes late, for the fork server of engines."""

import os

import torch
import transformers.models.auto.modeling_auto  # noqa: F401

import mrl.inference.transformers_engine.server  # noqa: F401
from mrl.inference.launch import keep_memory
from mrl.inference.transformers_engine.command import ON_A_CPU

os.environ |= ON_A_CPU
keep_memory()
torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
