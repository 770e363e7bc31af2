"""Which engine samples what, and which weights it holds meanwhile."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field


@dataclass
class Segment:
    """Requests (by index) that one engine samples with one set of weights."""

    key: str
    indices: list[int] = field(default_factory=list)


def schedule(
    costs: Sequence[float],
    keys: Sequence[str],
    held: Sequence[str],
    serves: Mapping[str, Sequence[int]],
    swap_cost: float,
) -> list[list[Segment]]:
    """Spreads requests over engines by expected work, swapping weights as rarely as it pays.

    Args:
        costs: expected work of each request.
        keys: weights key of each request.
        held: weights key that each engine holds now.
        serves: for each key the engines that can take it (same architecture).
        swap_cost: work that giving an engine other weights costs.

    Returns:
        For each engine its segments in order; what it already holds comes first. Requests keep their order within a
        segment, so candidates of one prompt stay together.
    """
    plan = _Plan(costs, held, serves, swap_cost)
    by_key: dict[str, list[int]] = {}
    for k, key in enumerate(keys):
        by_key.setdefault(key, []).append(k)
    for key in sorted(by_key, key=lambda key: -plan.work(by_key[key])):
        plan.place(key, by_key[key])
    for _ in range(4 * len(held)):
        if not plan.move_one():
            break
    return plan.segments()


class _Plan:
    """The parts of each engine while they are being moved about."""

    def __init__(
        self, costs: Sequence[float], held: Sequence[str], serves: Mapping[str, Sequence[int]], swap_cost: float
    ) -> None:
        self._costs, self._held, self._serves, self._swap_cost = costs, held, serves, swap_cost
        self._parts: list[dict[str, list[int]]] = [{} for _ in held]

    def work(self, part: Sequence[int]) -> float:
        return sum(self._costs[k] for k in part)

    def load(self, engine: int) -> float:
        """Work of an engine, swaps included."""
        parts = self._parts[engine]
        return sum(map(self.work, parts.values())) + self._swap_cost * sum(key != self._held[engine] for key in parts)

    def place(self, key: str, part: list[int]) -> None:
        """Whole to an idle engine that holds the weights, else to the least busy one that can."""
        if not self._serves[key]:
            raise ValueError(f"no engine can serve the weights {key!r}")
        holders = [e for e in self._serves[key] if self._held[e] == key and not self._parts[e]]
        engine = min(holders or self._serves[key], key=lambda e: (self.load(e), e))
        self._parts[engine][key] = part

    def move_one(self) -> bool:
        """Moves the tail of the largest part that helps from the busiest engine to an idler one."""
        busiest = max(range(len(self._parts)), key=self.load)
        for key, part in sorted(self._parts[busiest].items(), key=lambda kv: -self.work(kv[1])):
            others = [e for e in self._serves[key] if e != busiest]
            if not others:
                continue
            swap = {e: self._swap_cost * (key != self._held[e] and key not in self._parts[e]) for e in others}
            target = min(others, key=lambda e: self.load(e) + swap[e])
            surplus = (self.load(busiest) - self.load(target) - swap[target]) / 2
            cut, moved = len(part), 0.0
            while cut > 0 and moved + self._costs[part[cut - 1]] <= surplus:
                cut -= 1
                moved += self._costs[part[cut]]
            if moved <= swap[target] / 4 or moved <= 0.02 * self.load(busiest):
                continue
            self._parts[target].setdefault(key, []).extend(part[cut:])
            self._parts[target][key].sort()
            self._parts[busiest][key] = part[:cut]
            if not cut:
                del self._parts[busiest][key]
            return True
        return False

    def segments(self) -> list[list[Segment]]:
        return [
            [Segment(key, part) for key, part in sorted(parts.items(), key=lambda kv: kv[0] != self._held[e])]
            for e, parts in enumerate(self._parts)
        ]
