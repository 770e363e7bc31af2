"""Replay: which stored pairs a round trains on.

Ages count the eligible rounds from the newest: a = 0 … K−1. Rounds without pairs are never eligible. Draws depend on the
run's seed, the round and the sizes alone.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

from comlrl_ds.config.errors import ConfigError, Findings, Problem, nearest
from comlrl_ds.maths.seeds import generator_of

REPLAY_MODES = ("current", "nearest_k", "all_history", "lambda_decay")
REPLAY_ALIASES = {
    "latest": "current", "new": "current",
    "recent_k": "nearest_k", "last_k": "nearest_k", "k": "nearest_k",
    "lambda": "lambda_decay", "td_lambda": "lambda_decay", "td-lambda": "lambda_decay",
}  # fmt: skip

MODE, K, LAMBDA, SAMPLE_SIZE = (f"preference_replay_{name}" for name in ("mode", "k", "lambda", "sample_size"))


@dataclass(frozen=True)
class ReplaySettings:
    """The page's `preference_replay_*` settings.

    Args:
        mode: "current", all pairs of the round itself; else draws from "nearest_k", the k newest rounds, "all_history",
            every round, both with equal weight, or "lambda_decay", every round weighted by age. Aliases are taken.
        k: rounds of nearest_k, at least 1; the mode current takes 1.
        decay: λ of lambda_decay, in [0, 1].
        sample_size: draws of a historical mode; None: as many as the round has pairs, or the newest round that has any.

    Raises:
        ConfigError: a setting that the mode does not take, or lacks; all of them, under the page's names.
    """

    mode: str = "current"
    k: int | None = None
    decay: float | None = None
    sample_size: int | None = None

    def __post_init__(self) -> None:
        found = Findings()
        mode = self.mode.strip().lower() if isinstance(self.mode, str) else self.mode
        mode = REPLAY_ALIASES.get(mode, mode) if isinstance(mode, str) else mode
        if mode not in REPLAY_MODES:
            raise ConfigError(Problem(MODE, f"{self.mode!r} is not a replay mode{nearest(str(mode), REPLAY_MODES)}"))
        object.__setattr__(self, "mode", mode)
        _check_k(found, mode, self.k)
        _check_decay(found, mode, self.decay)
        if self.sample_size is not None and mode == "current":
            found.add(SAMPLE_SIZE, f"mode 'current' trains on every pair of the round; drop it, or give another {MODE}")
        elif self.sample_size is not None and not _whole(self.sample_size):
            found.add(SAMPLE_SIZE, f"{self.sample_size!r} is not a whole number of at least 1")
        found.raise_any()


def _whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def _check_k(found: Findings, mode: str, k: Any) -> None:
    if mode == "nearest_k":
        if k is None:
            found.add(K, "mode 'nearest_k' needs it: how many of the latest rounds to draw from")
        elif not _whole(k):
            found.add(K, f"{k!r} is not a whole number of at least 1")
    elif mode == "current":
        if k is not None and not (_whole(k) and k == 1):
            found.add(K, f"mode 'current' takes no k but 1, got {k!r}; for {k!r} rounds write {MODE}: nearest_k")
    elif k is not None:
        found.add(K, f"mode {mode!r} takes none; drop it, or write {MODE}: nearest_k")


def _check_decay(found: Findings, mode: str, decay: Any) -> None:
    if mode != "lambda_decay":
        if decay is not None:
            found.add(LAMBDA, f"mode {mode!r} takes none; drop it, or write {MODE}: lambda_decay")
    elif decay is None:
        found.add(LAMBDA, "mode 'lambda_decay' needs it: 0 keeps the newest round, 1 weights all alike")
    elif isinstance(decay, bool) or not isinstance(decay, int | float) or not 0 <= decay <= 1:
        found.add(LAMBDA, f"{decay!r} is not a number from 0 to 1")


def eligible_rounds(sizes: Mapping[int, int], settings: ReplaySettings, round: int) -> list[int]:
    """The rounds that may be drawn from, newest first. Empty rounds and rounds after `round` never are."""
    if settings.mode == "current":
        return [round] if sizes.get(round) else []
    past = sorted((r for r, size in sizes.items() if size and r <= round), reverse=True)
    return past[: settings.k] if settings.mode == "nearest_k" else past


def selection_weights(settings: ReplaySettings, count: int) -> list[float]:
    """Probability of each of `count` eligible rounds, newest first; sums to 1.

    lambda_decay: w_a = (1−λ) λ^a / (1−λ^K) = λ^a / Σ_b λ^b, so λ = 0 keeps the newest and λ = 1 is uniform; else 1/K.
    """
    decay = settings.decay if settings.mode == "lambda_decay" and settings.decay is not None else 1.0
    # Products, not powers: multiplication rounds alike on every machine, and so does each draw. The sum instead of
    # 1−λ^K: no cancellation near λ = 1.
    powers = list(itertools.accumulate([decay] * (count - 1), float.__mul__, initial=1.0)) if count else []
    total = math.fsum(powers)
    return [p / total for p in powers]


def sample_size(sizes: Mapping[int, int], settings: ReplaySettings, round: int) -> int:
    """Pairs that the round trains on: `settings.sample_size`, else the round's, else those of the newest round with any."""
    rounds = eligible_rounds(sizes, settings, round)
    if not rounds:
        return 0
    return settings.sample_size or sizes[rounds[0]]


def draw(sizes: Mapping[int, int], settings: ReplaySettings, run_seed: int, round: int) -> list[tuple[int, int]]:
    """What round `round` trains on: (round, record index) in training order.

    current: every record of the round in the file's order. The other modes assign each of the N draws to an eligible round
    by weight, take a round's share without repetition, or in whole shuffled copies first where the share exceeds the round,
    and shuffle the whole.

    Args:
        sizes: pairs of each round of this run, this one included; 0 or missing is a round without pairs.
    """
    rounds = eligible_rounds(sizes, settings, round)
    if settings.mode == "current":
        return [(r, k) for r in rounds for k in range(sizes[r])]
    if not rounds:
        return []
    generator = generator_of(run_seed, "replay", round)
    weights = selection_weights(settings, len(rounds))
    assigned = Counter(generator.choices(rounds, weights, k=sample_size(sizes, settings, round)))
    drawn = [(r, k) for r in rounds for k in _cycled(sizes[r], assigned[r], generator)]
    generator.shuffle(drawn)
    return drawn


def _cycled(size: int, count: int, generator: Random) -> list[int]:
    """`count` of range(size): each index ⌊count/size⌋ or ⌈count/size⌉ times."""
    copies, rest = divmod(count, size)
    whole = [k for _ in range(copies) for k in generator.sample(range(size), size)]
    return whole + generator.sample(range(size), rest)


def shares(drawn: Sequence[tuple[int, int]]) -> dict[int, float]:
    """Share of the draw that comes from each round, oldest first; rounds without any are missing."""
    counts = Counter(r for r, _ in drawn)
    return {r: counts[r] / len(drawn) for r in sorted(counts)}
