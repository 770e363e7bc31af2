"""The public trainers of preference-based learning."""

from comlrl_ds.config.madpo import MADPOConfig
from comlrl_ds.trainers.preference.madpo import MADPOTrainer

__all__ = ["MADPOConfig", "MADPOTrainer"]
