"""Replay: which stored pairs a round trains on.

Ages count the eligible rounds from the newest: a = 0 … K−1. Rounds without pairs are never eligible. Draws depend on the
run's seed, the round and the sizes alone.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from random import Random

from comlrl_ds.config.replay import ReplaySettings
from comlrl_ds.maths.seeds import generator_of


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
