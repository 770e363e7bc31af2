"""From scored candidates to the preference pairs of a round."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from comlrl_ds.maths.seeds import generator_of
from comlrl_ds.preference.collection import SampledItem
from comlrl_ds.preference.oracle import MISSING
from comlrl_ds.preference.records import PreferencePair, make_pair
from comlrl_ds.preference.selection import count_ties, select_compared, select_pairs


class InvalidScoresError(RuntimeError):
    """Too large a share of the oracle's scores is NaN or infinite."""


@dataclass(frozen=True)
class Collected:
    """The pairs of a round, with what happened on the way.

    Attributes:
        sampled: tasks with all candidates; of an iterative round the team's come first, then the comparator's.
        ties: comparisons of equal score. invalid: NaN or infinite scores. scores: all that the oracle gave.
        compared: comparisons of an iterative round with two finite scores. wins: those that the team won.
        missing: comparisons without an answer of one side.
        without_gradient: selected pairs that were dropped, since no policy could learn anything from them.
    """

    pairs: list[PreferencePair]
    sampled: list[SampledItem]
    ties: int
    invalid: int
    scores: int
    compared: int = 0
    wins: int = 0
    missing: int = 0
    without_gradient: int = 0

    @property
    def score_mean(self) -> float:
        return mean_score(self.sampled)

    def lengths(self, side: str) -> list[float]:
        """Mean tokens of the winners' or losers' completions, per agent."""
        agents = range(len(self.pairs[0].tokens)) if self.pairs else ()
        return [sum(len(getattr(p.tokens[i], side)) for p in self.pairs) / len(self.pairs) for i in agents]


def mean_score(items: Sequence[SampledItem]) -> float:
    """Mean of the finite scores; NaN without any."""
    finite = [s.value for item in items for s in item.scores if s.valid]
    return math.fsum(finite) / len(finite) if finite else math.nan


def with_gradient(collected: Collected, teaches: Callable[[PreferencePair], bool]) -> Collected:
    """Without the pairs from which nothing can be learned, such as two responses that differ in no scored token."""
    kept = [pair for pair in collected.pairs if teaches(pair)]
    return replace(collected, pairs=kept, without_gradient=len(collected.pairs) - len(kept))


def pairs_from(
    sampled: Sequence[SampledItem],
    *,
    mode: str,
    cap: int | None,
    run_seed: int,
    round: int,
    max_invalid_fraction: float,
) -> Collected:
    """Pairs of a base trainer's round: any two candidates of a task with different scores, selected per task.

    Raises:
        InvalidScoresError: more than `max_invalid_fraction` of the scores are NaN or infinite.
    """
    invalid, scores = _check_scores(sampled, max_invalid_fraction)
    pairs, ties = [], 0
    for item in sampled:
        values = [s.value if s.valid else math.nan for s in item.scores]
        ties += count_ties(values)
        generator = generator_of(run_seed, "pair_selection", round, item.joint.index)
        pairs += [make_pair(item, w, lo) for w, lo in select_pairs(values, mode, cap, generator)]
    return Collected(pairs, list(sampled), ties, invalid, scores)


def compared_pairs(
    target: Sequence[SampledItem], comparator: Sequence[SampledItem], *, mode: str, cap: int | None, run_seed: int,
    round: int, max_invalid_fraction: float,
) -> Collected:  # fmt: skip
    """Pairs of an iterative round: the team's response against the comparator's at the same candidate index.

    A comparison with two different finite scores is a pair, whichever side wins; of each task those that `mode` says are
    kept. In a pair's (item, winner, loser) the comparator's candidates follow the team's.

    Args:
        target, comparator: the same tasks in the same order; the comparator's completions in the agents' tokens.

    Raises:
        InvalidScoresError: more than `max_invalid_fraction` of the scores are NaN or infinite.
    """
    invalid, scores = _check_scores([*target, *comparator], max_invalid_fraction)
    pairs: list[PreferencePair] = []
    merged, ties, compared, wins, missing = [], 0, 0, 0, 0
    for ours, theirs in zip(target, comparator, strict=True):
        both = range(min(len(ours.scores), len(theirs.scores)))
        rows = [(j, ours.scores[j], theirs.scores[j]) for j in both]
        missing += sum(a is MISSING or b is MISSING for _, a, b in rows)
        values = [(j, a.value, b.value) for j, a, b in rows if a.valid and b.valid]
        compared += len(values)
        ties += sum(a == b for _, a, b in values)
        wins += sum(a > b for _, a, b in values)
        item = _merged(ours, theirs)
        merged.append(item)
        finite = [s.value for _, a, b in rows if a is not MISSING and b is not MISSING for s in (a, b) if s.valid]
        generator = generator_of(run_seed, "pair_selection", round, item.joint.index)
        for j, won in select_compared(values, mode, cap, generator):
            other = len(ours.scores) + j
            pair = make_pair(item, *((j, other) if won else (other, j)))
            mean, raws = math.fsum(finite) / len(finite), (ours.scores[j].raw, theirs.scores[j].raw)
            pair = replace(pair, candidate_reward_mean=mean, target_raw_reward=raws[0], comparator_raw_reward=raws[1])
            pairs.append(pair)
    return Collected(pairs, merged, ties, invalid, scores, compared, wins, missing)


def _merged(ours: SampledItem, theirs: SampledItem) -> SampledItem:
    """Both sides' candidates of a task under the team's own prompts."""
    join = lambda first, second: [[*a, *b] for a, b in zip(first, second)]  # noqa: E731
    return SampledItem(
        ours.joint, join(ours.completions, theirs.completions), join(ours.texts, theirs.texts),
        [*ours.scores, *theirs.scores], join(ours.written, theirs.written),
    )  # fmt: skip


def _check_scores(sampled: Sequence[SampledItem], max_invalid_fraction: float) -> tuple[int, int]:
    """(invalid scores, all scores)."""
    scores = [s for item in sampled for s in item.scores if s is not MISSING]
    invalid = sum(not s.valid for s in scores)
    if invalid > max_invalid_fraction * len(scores):
        first = next(item.joint.index for item in sampled if any(not s.valid and s is not MISSING for s in item.scores))
        raise InvalidScoresError(
            f"{invalid} of {len(scores)} oracle scores are NaN or infinite (first at task {first}), more than"
            f" max_invalid_fraction = {max_invalid_fraction} allows; the scores so far are in the journal"
        )
    return invalid, len(scores)
