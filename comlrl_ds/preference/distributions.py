"""How the raw rewards of a round are spread over the range of the task reward (`log_reward_distribution`)."""

from __future__ import annotations

import json
import math
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from numbers import Real
from pathlib import Path
from typing import Any

from comlrl_ds.config.errors import ConfigError, Problem
from comlrl_ds.runs.files import write_atomically

NUM_BINS = 16

Sides = tuple[Sequence[float], Sequence[float]]
"""Raw rewards of the current agents (target) and of the comparator."""


def check_reward_range(reward_func: Any) -> tuple[float, float]:
    """`reward_func.reward_range` as (lo, hi), in the reward's own units.

    Raises:
        ConfigError: it is not set, or not two finite numbers with lo < hi and a finite hi - lo.
    """
    written = getattr(reward_func, "reward_range", None)
    if isinstance(written, (tuple, list)) and len(written) == 2 and all(map(_is_finite, written)):
        low, high = map(float, written)
        if low < high and math.isfinite(high - low):
            return low, high
    shown = "it is not set" if written is None else f"it is {written!r:.80}"
    raise ConfigError(
        Problem(
            "log_reward_distribution",
            f"needs reward_func.reward_range = (lo, hi), two finite numbers with lo < hi, but {shown};"
            " set it on the reward function, e.g. reward.reward_range = (0.0, 1.0), or leave log_reward_distribution off",
        )
    )


def bin_edges(reward_range: tuple[float, float], bins: int = NUM_BINS) -> list[float]:
    """bins + 1 edges e_k = lo + (hi - lo) k / bins, in order, from exactly lo to exactly hi."""
    low, high = reward_range
    return [*(min(low + (high - low) * (k / bins), high) for k in range(bins)), high]


def distribution_of(raw_rewards: Sequence[float], reward_range: tuple[float, float], bins: int = NUM_BINS) -> dict[str, Any]:
    """Counts of raw rewards over equal bins of the range.

    Bin k holds e_k ≤ r < e_{k+1}, the last one hi too; a reward outside the range counts in the bin at its end. NaN and
    infinities are left out of everything. The mean and the listed rewards are as scored, not clipped.

    Args:
        raw_rewards: rewards before `reward_processor`.
        reward_range: (lo, hi) with lo < hi.

    Returns:
        {"sample_count": finite rewards, "mean": theirs, None without any, "counts": one int per bin, "raw_rewards": they}.
    """
    low, high = reward_range
    edges = bin_edges(reward_range, bins)
    finite = [float(r) for r in raw_rewards if math.isfinite(r)]
    counts = [0] * bins
    for r in finite:
        counts[min(bisect_right(edges, min(max(r, low), high)) - 1, bins - 1)] += 1
    return {
        "sample_count": len(finite),
        "mean": math.fsum(finite) / len(finite) if finite else None,
        "counts": counts,
        "raw_rewards": finite,
    }


def distribution_content(
    iteration: int, reward_range: tuple[float, float], *, candidate: Sides, selected: Sides
) -> dict[str, Any]:
    """What `write_distribution` writes; for its arguments see there."""
    low, high = reward_range
    return {
        "iteration": iteration,
        "reward_min": low,
        "reward_max": high,
        "num_bins": NUM_BINS,
        "bin_edges": bin_edges(reward_range),
        "bin_centers": [low + (high - low) * ((k + 0.5) / NUM_BINS) for k in range(NUM_BINS)],
        "candidate": _sides(candidate, reward_range),
        "selected": _sides(selected, reward_range),
    }


def write_distribution(
    folder: Path, iteration: int, reward_range: tuple[float, float], *, candidate: Sides, selected: Sides
) -> Path:
    """Writes `iteration_NNNN.json` into the folder, which is made if need be; an earlier file of the round is replaced.

    Args:
        iteration: the round, from 1.
        reward_range: what `check_reward_range` returned.
        candidate: (target, comparator) raw rewards of everything that was sampled.
        selected: the same of the round's training pairs, one of each per pair.
    """
    content = distribution_content(iteration, reward_range, candidate=candidate, selected=selected)
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / f"iteration_{iteration:04d}.json"
    write_atomically(file, json.dumps(content, allow_nan=False, separators=(",", ":")).encode())
    return file


def distribution_metrics(content: Mapping[str, Any], *, pair_count: int | None = None) -> dict[str, float]:
    """The round's metrics, by the peer's names; a mean of nothing is NaN.

    Args:
        content: of a distribution file.
        pair_count: the round's training pairs; None counts the target's selected rewards, one per pair.
    """
    metrics: dict[str, float] = {}
    for section, prefix in (("candidate", "iter/reward_distribution"), ("selected", "iter/selected_reward_distribution")):
        metrics[f"{prefix}/current_iteration"] = content["iteration"]
        if section == "selected":
            metrics[f"{prefix}/pair_count"] = content[section]["target"]["sample_count"] if pair_count is None else pair_count
        for side in ("target", "comparator"):
            found = content[section][side]
            metrics[f"{prefix}/{side}_sample_count"] = found["sample_count"]
            metrics[f"{prefix}/{side}_mean"] = math.nan if found["mean"] is None else found["mean"]
    return metrics


def _sides(rewards: Sides, reward_range: tuple[float, float]) -> dict[str, dict[str, Any]]:
    target, comparator = rewards
    return {"target": distribution_of(target, reward_range), "comparator": distribution_of(comparator, reward_range)}


def _is_finite(value: Any) -> bool:
    try:
        return isinstance(value, Real) and not isinstance(value, bool) and math.isfinite(value)
    except OverflowError:  # an integer that no float reaches
        return False
