"""What lengths alone can tell of preferences: logistic regressions (Bradley–Terry) on features of lengths."""

from __future__ import annotations

import itertools
from collections.abc import Mapping

import numpy as np

Sides = tuple[np.ndarray, np.ndarray]  # of winners and losers

# Lengths [pairs, agents] to features [pairs, any]. Logs with all products know every quadratic of the log length ratio.
TRANSFORMS = {
    "n": lambda n: n,
    "n, n²": lambda n: np.hstack([n, n**2]),
    "log n": np.log1p,
    "log n, log² n": lambda n: np.hstack([np.log1p(n), np.log1p(n) ** 2]),
    "quadratic in n": lambda n: np.hstack([n, products(n)]),
    "quadratic in log n": lambda n: np.hstack([np.log1p(n), products(np.log1p(n))]),
}


def products(columns: np.ndarray) -> np.ndarray:
    """Every column times itself and every other."""
    both = itertools.combinations_with_replacement(range(columns.shape[1]), 2)
    return np.stack([columns[:, a] * columns[:, b] for a, b in both], 1)


def bradley_terry_fit(x: np.ndarray, ridge: float = 1e-3) -> np.ndarray:
    """w that minimises mean log(1 + exp(−x·w)) + ridge/2 · |w·rms(x)|², x = features of winners − of losers.

    No intercept: which side is called the first means nothing. Features that never differ get 0.
    """
    scale = np.sqrt((x**2).mean(0)) if len(x) else np.zeros(x.shape[1])
    used = scale > 0
    x, w = x[:, used] / scale[used], np.zeros(int(used.sum()))

    def loss(w: np.ndarray) -> float:
        return float(np.logaddexp(0, -x @ w).mean() + ridge / 2 * w @ w)

    for _ in range(100 if used.any() else 0):  # Newton, its steps halved until they help
        p = 1 / (1 + np.exp(np.clip(x @ w, -500, 500)))
        slope = -x.T @ p / len(x) + ridge * w
        step = np.linalg.solve((x.T * (p * (1 - p))) @ x / len(x) + ridge * np.eye(len(w)), slope)
        before = loss(w)
        while loss(w - step) > before and np.abs(step).max() > 1e-12:
            step = step / 2
        w = w - step
        if np.abs(step).max() < 1e-9:
            break
    whole = np.zeros(len(used))
    whole[used] = w / scale[used]
    return whole


def right(margins: np.ndarray) -> np.ndarray:
    """1 where the winner is ahead, 0 where it is behind, ½ at a tie."""
    return (1 + np.sign(margins)) / 2


def clustered(values: np.ndarray, clusters: np.ndarray) -> tuple[float, float]:
    """Mean, and its standard error where values of one cluster (pairs of one task) may go together."""
    if not len(values):
        return float("nan"), float("nan")
    mean, names = values.mean(), np.unique(clusters)
    sums = np.array([(values[clusters == c] - mean).sum() for c in names])
    spread = len(names) / (len(names) - 1) * (sums**2).sum() if len(names) > 1 else float("nan")
    return float(mean), float(np.sqrt(spread) / len(values))


def length_only(fit: Mapping[str, Sides], held_out: Mapping[str, Sides]) -> dict[str, np.ndarray]:
    """Which held-out pairs each length-only model orders right, by "unit: features".

    Args:
        fit, held_out: by unit of length, [pairs, agents] lengths of both sides.
    """
    found = {}
    for unit, (name, transform) in itertools.product(fit, TRANSFORMS.items()):
        (w, lo), (held_w, held_lo) = (map(transform, sides[unit]) for sides in (fit, held_out))
        found[f"{unit}: {name}"] = right((held_w - held_lo) @ bradley_terry_fit(w - lo))
    return found
