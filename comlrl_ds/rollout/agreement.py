"""Whether an engine computes what its trainer does, as far as their types allow: the judgement of a finished sync.

Both forward the same fixed rows, and their log-probs may differ by rounding alone. Rounding grows with the size of what is
rounded, for which the mean |log p| of the rows stands, and like a random walk with the number of layers. So

    mean |log p trainer − log p engine|  ≤  SHARE[type] · sqrt(layers) · mean |log p trainer|

Correct syncs of random models of 2 and 16 layers, from the usual initialisation to ten times its width, were measured on a
CPU: the left side was at most 0.44 ε · sqrt(layers) · mean |log p| in bfloat16, 0.34 ε in float16 and 0.96 ε in float32, ε
being the type's distance from 1 to the next number. The mean is judged and not the largest gap, because in the narrow types
a token of a mixture now and then goes to another expert.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from comlrl_ds.config.model_files import config_of
from comlrl_ds.rollout.base import RolloutError

# Twice ε, and so more than four times what was measured. float32 has room to spare: 128 ε still sees what no other type can.
SHARE = {"float32": 2**-16, "float16": 2**-9, "bfloat16": 2**-6}
# float32 on a GPU: its matrix units may round factors to TF32, which has float16's precision.
SHARE_GPU = SHARE | {"float32": SHARE["float16"]}
# Of a server whose type this side does not know.
COARSEST = "bfloat16"


@dataclass(frozen=True)
class Reference:
    """The trainer's log-probs of the probe rows, [rows][tokens], and the type that it computed them in."""

    logprobs: Sequence[Sequence[float]]
    dtype: str


def layers_of_model(source: str) -> int:
    """Number of layers that a model folder's config states; 1 where it states none, which is the strictest."""
    config = config_of(Path(source))
    config = config.get("text_config", config)
    return next((int(config[k]) for k in ("num_hidden_layers", "n_layer", "num_layers") if config.get(k)), 1)


def tolerance(reference: Reference, dtype: str, layers: int, on_cpu: bool) -> float:
    """Largest mean gap in nats a token that rounding explains, the coarser of the two types deciding.

    Args:
        dtype: of the engine. layers: of the model. on_cpu: whether the engine is known to compute on a CPU.
    """
    table = SHARE if on_cpu else SHARE_GPU
    values = [abs(x) for row in reference.logprobs for x in row]
    return max(table[dtype], table[reference.dtype]) * math.sqrt(layers) * math.fsum(values) / len(values)


def check_agreement(
    policy: str, engine: str, found: Sequence[Sequence[float]], reference: Reference, *, dtype: str, layers: int, on_cpu: bool
) -> float:  # fmt: skip
    """The mean gap of an engine's log-probs from its trainer's.

    Args:
        policy, engine: their names, for messages. found: the engine's log-probs of the reference's rows.
        dtype, layers, on_cpu: see `tolerance`.

    Raises:
        RolloutError: it is more than `tolerance`, or no number.
    """
    gaps = [
        abs(x - y) for ours, theirs in zip(reference.logprobs, found, strict=True) for x, y in zip(ours, theirs, strict=True)
    ]
    gap, most = math.fsum(gaps) / len(gaps), tolerance(reference, dtype, layers, on_cpu)
    if not gap <= most:
        raise RolloutError(
            f"weight sync of {policy}: {engine} is {gap:.3g} nats a token off the trainer on the probe, and {dtype} explains"
            f" {most:.3g}; nothing was sampled with these weights (rollout.verify_sync: false turns this check off)"
        )
    return gap
