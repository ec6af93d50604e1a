"""mrl: reinforcement learning for language models on Megatron-Core."""

import warnings

__version__ = "0.1.0"

# torch's word on a package that nvidia-resiliency-ext brings along; of no use to a user
warnings.filterwarnings("ignore", "The pynvml package is deprecated", FutureWarning)
