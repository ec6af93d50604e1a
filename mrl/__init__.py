"""mrl: reinforcement learning for language models on Megatron-Core."""

import warnings
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

# torch's word on a package that nvidia-resiliency-ext brings along; of no use to a user
warnings.filterwarnings("ignore", "The pynvml package is deprecated", FutureWarning)

if TYPE_CHECKING:
    from mrl.api.trainers import DDPOTrainer as DDPOTrainer
    from mrl.api.trainers import DiffusionSFTTrainer as DiffusionSFTTrainer
    from mrl.api.trainers import DPOTrainer as DPOTrainer
    from mrl.api.trainers import GRPOTrainer as GRPOTrainer
    from mrl.api.trainers import PPOTrainer as PPOTrainer
    from mrl.api.trainers import RewardTrainer as RewardTrainer
    from mrl.api.trainers import RLTrainer as RLTrainer
    from mrl.api.trainers import SFTTrainer as SFTTrainer
    from mrl.api.trainers import TrainingFailed as TrainingFailed
    from mrl.api.trainers import TrainingResult as TrainingResult
    from mrl.trainers.shared.callbacks import TrainerCallback as TrainerCallback
    from mrl.trainers.shared.callbacks import TrainerState as TrainerState

_TRAINERS = "mrl.api.trainers"
_PUBLIC = {  # imported on first use, since most commands need none of it
    **dict.fromkeys(("PPOTrainer", "GRPOTrainer", "RLTrainer", "SFTTrainer", "DPOTrainer", "RewardTrainer"), _TRAINERS),
    **dict.fromkeys(("DDPOTrainer", "DiffusionSFTTrainer", "TrainingFailed", "TrainingResult"), _TRAINERS),
    **dict.fromkeys(("TrainerCallback", "TrainerState"), "mrl.trainers.shared.callbacks"),
}
__all__ = ["__version__", *_PUBLIC]


def __getattr__(name: str) -> Any:
    import importlib

    if name not in _PUBLIC:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_PUBLIC[name]), name)
