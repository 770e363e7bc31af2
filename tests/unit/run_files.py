"""A good run file, and the problems that checking finds, for the tests of settings and of the command line."""

from __future__ import annotations

import textwrap
from pathlib import Path

import pytest

from comlrl_ds.config import ConfigError

GOOD = """
trainer: madpo
agents:
  - {model: a}
  - {model: b}
task:
  dataset: comlrl_ds.tasks.explain:train_items
  reward_func: comlrl_ds.tasks.explain:reward
args:
  agent_learning_rate: 1e-5
  max_new_tokens: [48, 96]
"""


def problems(call) -> dict[str, str]:
    with pytest.raises(ConfigError) as caught:
        call()
    return {p.path: p.message for p in caught.value.problems}


def written(folder: Path, text: str) -> Path:
    file = folder / "run.yaml"
    file.write_text(textwrap.dedent(text))
    return file
