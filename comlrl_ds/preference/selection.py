"""Which pairs a task keeps."""

from __future__ import annotations

import math
from collections.abc import Sequence
from random import Random


def select_pairs(scores: Sequence[float], mode: str, cap: int | None, generator: Random) -> list[tuple[int, int]]:
    """Pairs (winner, loser) of candidate indices of one task.

    Every two candidates with different finite scores make a pair; ties and invalid scores never do.

    Args:
        scores: processed oracle scores, one per candidate.
        mode: "reward_gap", largest difference first (earlier winner, then earlier loser first among equals);
            "random", shuffled by `generator`; "all", by (winner, loser).
        cap: pairs kept; None keeps all.
    """
    pairs = [
        (i, j)
        for i, high in enumerate(scores)
        for j, low in enumerate(scores)
        if math.isfinite(high) and math.isfinite(low) and high > low
    ]
    if mode == "reward_gap":
        pairs.sort(key=lambda pair: scores[pair[1]] - scores[pair[0]])
    elif mode == "random":
        generator.shuffle(pairs)
    return pairs[:cap]


def select_compared(
    values: Sequence[tuple[int, float, float]], mode: str, cap: int | None, generator: Random
) -> list[tuple[int, bool]]:
    """(candidate index, whether the team won) of the comparisons of one task that are kept; ties never are.

    Args:
        values: (candidate index, the team's score, the comparator's score), both finite.
        mode: "comparator_reward", highest comparator score first, then largest difference, whoever won; "reward_gap",
            largest difference first; "random"; "all", by index. Earlier candidates come first among equals.
        cap: pairs kept; None keeps all.
    """
    decided = [(j, ours, theirs) for j, ours, theirs in values if ours != theirs]
    if mode == "comparator_reward":
        decided.sort(key=lambda row: (-row[2], -abs(row[1] - row[2])))
    elif mode == "reward_gap":
        decided.sort(key=lambda row: -abs(row[1] - row[2]))
    elif mode == "random":
        generator.shuffle(decided)
    return [(j, ours > theirs) for j, ours, theirs in decided[:cap]]


def count_ties(scores: Sequence[float]) -> int:
    """Unordered pairs of candidates with the same finite score."""
    finite = [s for s in scores if math.isfinite(s)]
    return sum(finite[i] == finite[j] for i in range(len(finite)) for j in range(i))
