"""Intervals of work, and how much of them happens at the same time."""

from __future__ import annotations

from collections.abc import Sequence

Span = tuple[float, float]


def busy(spans: Sequence[Span]) -> float:
    """Seconds covered by non-overlapping spans."""
    return sum(end - start for start, end in spans)


def common(a: Sequence[Span], b: Sequence[Span]) -> list[Span]:
    """The parts that two sets of spans share."""
    met = ((max(s, t), min(e, f)) for s, e in a for t, f in b)
    return [(start, end) for start, end in met if end > start]


def overlap(agents: Sequence[Sequence[Span]]) -> float:
    """Seconds in which all are busy, as a share of the least busy one's; 1 for a single agent, 0 where nobody works."""
    least = min(map(busy, agents), default=0.0)
    if not least:
        return 0.0
    shared = list(agents[0])
    for other in agents[1:]:
        shared = common(shared, other)
    return busy(shared) / least
