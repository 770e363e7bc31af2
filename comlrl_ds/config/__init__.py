"""Typed settings. Every problem is found at once, carries its path in what the user wrote, and costs nothing to find."""

from comlrl_ds.config.errors import ConfigError, Problem
from comlrl_ds.config.madpo import MADPOConfig
from comlrl_ds.config.run_file import RolloutConfig, RunFile, load_run_file

__all__ = ["ConfigError", "MADPOConfig", "Problem", "RolloutConfig", "RunFile", "load_run_file"]
