"""The public trainers of preference-based learning."""

from comlrl_ds.config.iterative import MADPOIterConfig
from comlrl_ds.config.madpo import MADPOConfig
from comlrl_ds.config.marlhf import MARLHFConfig, MARLHFIterConfig
from comlrl_ds.engines.scalar import JointRewardModel
from comlrl_ds.preference.centralized import (
    CentralizedComparatorAdapter,
    CentralizedComparatorParseError,
    TaggedCentralizedComparatorAdapter,
)
from comlrl_ds.trainers.preference.madpo import MADPOTrainer
from comlrl_ds.trainers.preference.madpo_iter import MADPOIterTrainer
from comlrl_ds.trainers.preference.marlhf import MARLHFIterTrainer, MARLHFTrainer

__all__ = [
    "CentralizedComparatorAdapter",
    "CentralizedComparatorParseError",
    "JointRewardModel",
    "MADPOConfig",
    "MADPOIterConfig",
    "MADPOIterTrainer",
    "MADPOTrainer",
    "MARLHFConfig",
    "MARLHFIterConfig",
    "MARLHFIterTrainer",
    "MARLHFTrainer",
    "TaggedCentralizedComparatorAdapter",
]
