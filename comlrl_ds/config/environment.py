"""Switches in the environment."""

from __future__ import annotations

import os
from collections.abc import Mapping

from comlrl_ds.config.errors import ConfigError, Problem

TRACEBACK = "COMLRL_DS_TRACEBACK"
_ON, _OFF = ("1", "true", "yes", "on"), ("", "0", "false", "no", "off")


def switched_on(name: str, environment: Mapping[str, str] = os.environ) -> bool:
    """Whether a switch is on; it is off where it is not set.

    Raises:
        ConfigError: its value says neither on nor off.
    """
    value = environment.get(name, "").strip().lower()
    if value in _ON:
        return True
    if value in _OFF:
        return False
    raise ConfigError(Problem(name, f"is {environment[name]!r} in the environment; write 1 or 0"))
