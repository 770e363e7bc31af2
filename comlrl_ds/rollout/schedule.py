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
    plan: list[dict[str, list[int]]] = [{} for _ in held]
    by_key: dict[str, list[int]] = {}
    for k, key in enumerate(keys):
        by_key.setdefault(key, []).append(k)

    def load(engine: int) -> float:
        segments = plan[engine]
        return sum(costs[k] for part in segments.values() for k in part) + swap_cost * sum(
            key != held[engine] for key in segments
        )

    total = {key: sum(costs[k] for k in part) for key, part in by_key.items()}
    for key in sorted(by_key, key=lambda key: -total[key]):
        if not serves[key]:
            raise ValueError(f"no engine can serve the weights {key!r}")
        holders = [e for e in serves[key] if held[e] == key and not plan[e]]
        engine = min(holders or serves[key], key=lambda e: (load(e), e))
        plan[engine][key] = by_key[key]
    for _ in range(4 * len(held)):
        if not _move_one(plan, costs, held, serves, swap_cost, load):
            break
    return [
        [Segment(key, part) for key, part in sorted(segments.items(), key=lambda kv: kv[0] != held[e])]
        for e, segments in enumerate(plan)
    ]


def _move_one(plan, costs, held, serves, swap_cost, load) -> bool:
    """Moves the tail of the largest segment that helps from the busiest engine to an idler one."""
    busiest = max(range(len(plan)), key=load)
    for key, part in sorted(plan[busiest].items(), key=lambda kv: -sum(costs[k] for k in kv[1])):
        others = [e for e in serves[key] if e != busiest]
        if not others:
            continue
        swap = {e: swap_cost * (key != held[e] and key not in plan[e]) for e in others}
        target = min(others, key=lambda e: load(e) + swap[e])
        surplus = (load(busiest) - load(target) - swap[target]) / 2
        cut, moved = len(part), 0.0
        while cut > 0 and moved + costs[part[cut - 1]] <= surplus:
            cut -= 1
            moved += costs[part[cut]]
        if moved <= swap[target] / 4 or moved <= 0.02 * load(busiest):
            continue
        plan[target].setdefault(key, []).extend(part[cut:])
        plan[target][key].sort()
        plan[busiest][key] = part[:cut]
        if not cut:
            del plan[busiest][key]
        return True
    return False
