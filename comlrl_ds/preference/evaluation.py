"""Evaluation: sampled responses of the current policies, scored by the task reward."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from comlrl_ds.preference.collection import SampledItem
from comlrl_ds.runs.files import write_atomically


@dataclass(frozen=True)
class Evaluation:
    """Task rewards by item: [item][sample], finite ones only; `items` are the tasks' indices."""

    items: list[int]
    rewards: list[list[float]]

    @property
    def item_means(self) -> list[float]:
        return [math.fsum(r) / len(r) for r in self.rewards]

    @property
    def mean(self) -> float:
        return mean_and_error(self.item_means)[0]

    @property
    def standard_error(self) -> float:
        """Standard error of the mean over tasks."""
        return mean_and_error(self.item_means)[1]

    def gain_over(self, earlier: Evaluation) -> tuple[float, float]:
        """(mean difference, its paired standard error) over the tasks that both have."""
        before = dict(zip(earlier.items, earlier.item_means))
        return mean_and_error([x - before[k] for k, x in zip(self.items, self.item_means) if k in before])


def win_rate_over(now: Evaluation, before: Evaluation) -> float:
    """Share of the tasks of both on which the mean reward is higher now; equal ones count half."""
    earlier = dict(zip(before.items, before.item_means))
    rows = [(x, earlier[k]) for k, x in zip(now.items, now.item_means) if k in earlier]
    return sum((x > y) + 0.5 * (x == y) for x, y in rows) / len(rows) if rows else math.nan


def mean_and_error(values: Sequence[float]) -> tuple[float, float]:
    """(mean, sample standard deviation / √n); NaN where n is too small."""
    n = len(values)
    if not n:
        return math.nan, math.nan
    mean = math.fsum(values) / n
    if n == 1:
        return mean, math.nan
    return mean, math.sqrt(math.fsum((x - mean) ** 2 for x in values) / (n - 1) / n)


def evaluation_of(sampled: Sequence[SampledItem]) -> Evaluation:
    """Finite rewards per task; a task without any is left out."""
    kept = [(s.joint.index, [x.value for x in s.scores if x.valid]) for s in sampled]
    return Evaluation([k for k, r in kept if r], [r for _, r in kept if r])


def write_samples(file: Path, sampled: Sequence[SampledItem]) -> None:
    """What was answered and how it was scored; the same run writes the same bytes."""
    content = [
        {
            "item": s.joint.index,
            "prompts": [p.text for p in s.joint.prompts],
            "samples": [
                {"completions": [row[j] for row in s.texts], "reward": x.value if x.valid else None}
                for j, x in enumerate(s.scores)
            ],
        }
        for s in sampled
    ]
    file.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(file, (json.dumps(content, ensure_ascii=False, indent=1) + "\n").encode("utf-8", "replace"))
