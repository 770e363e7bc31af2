"""Scalar heads: of reward models, of critics, and of actors that are their own critics."""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from comlrl_ds.config.errors import ConfigError, Problem

HEAD_FILE = "scalar_head.safetensors"
# Folder of a policy's value head in the policy's own: engines take every *.safetensors beside a model for its weights.
VALUE_HEAD = "value_head"


@dataclass(frozen=True)
class ValueHead:
    """A value head to make: the seed of its first values, and the width of a layer before it."""

    seed: int
    hidden_dim: int | None


def make_head(width: int, seed: int, hidden_dim: int | None) -> nn.Sequential:
    """The head; equal seeds give equal heads, whatever was drawn before, and nobody else's draws are moved.

    Its last weights start as N(0, 1/(n+1)²) of n inputs, without bias, so that first values are near 0. A language model's last
    hidden states are long: with weights of the usual size, n^−½, two texts start as far apart as a whole fit moves them, and
    what some hundred pairs teach drowns in that.
    """
    sizes = [width, *([hidden_dim] if hidden_dim else []), 1]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        layers: list[nn.Module] = []
        for k, (a, b) in enumerate(itertools.pairwise(sizes)):
            layer = nn.Linear(a, b)
            if k == len(sizes) - 2:
                nn.init.normal_(layer.weight, 0.0, 1 / (a + 1))
                nn.init.zeros_(layer.bias)
            layers += [layer, nn.Tanh()] if k < len(sizes) - 2 else [layer]
    return nn.Sequential(*layers)


def save_head(head: Mapping[str, Tensor], folder: Path) -> None:
    """Writes a head's tensors into a model's folder."""
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    save_file({n: t.detach().cpu().contiguous() for n, t in head.items()}, folder / HEAD_FILE)
    sizes = {n: list(t.shape) for n, t in head.items()}
    (folder / "scalar_head.json").write_text(json.dumps(sizes))


def load_head(folder: Path, head: nn.Module) -> None:
    """Fills a head from what `save_head` wrote.

    Raises:
        ConfigError: there is none, or it is of another shape.
    """
    from safetensors.torch import load_file

    file = folder / HEAD_FILE
    if not file.is_file():
        raise ConfigError(Problem(str(folder), f"has no {HEAD_FILE}; it is a language model, not a saved reward model"))
    found, wanted = load_file(file), head.state_dict()
    if {n: t.shape for n, t in found.items()} != {n: t.shape for n, t in wanted.items()}:
        raise ConfigError(Problem(str(file), "is a head of another shape; set the head's width to that of then"))
    head.load_state_dict(found)
