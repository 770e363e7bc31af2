"""Joint responses of the team to tasks, scored by the oracle while the rest is still being sampled."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from comlrl_ds.maths.seeds import generator_of, seed_of
from comlrl_ds.preference.journal import Journal, Known
from comlrl_ds.preference.oracle import INVALID, Oracle, OracleError, Score
from comlrl_ds.preference.prompts import JointPrompt
from comlrl_ds.preference.records import PreferencePair, make_pair
from comlrl_ds.preference.selection import count_ties, select_pairs
from comlrl_ds.rollout.base import Completion, PolicyWeights, Request, Sampling
from comlrl_ds.rollout.pool import RolloutPool

REQUESTS_PER_CHUNK = 4096


class InvalidScoresError(RuntimeError):
    """Too large a share of the oracle's scores is NaN or infinite."""


@dataclass
class SampledItem:
    """One task with every agent's candidates: `completions` and `texts` are [agent][candidate], `scores` [candidate]."""

    joint: JointPrompt
    completions: list[list[Completion]]
    texts: list[list[str]] = field(default_factory=list)
    scores: list[Score] = field(default_factory=list)

    @property
    def values(self) -> list[float]:
        return [s.value for s in self.scores]


@dataclass(frozen=True)
class Team:
    """What sampling has to know of the agents, one entry each."""

    tokenizers: Sequence[Any]
    token_limits: Sequence[int]
    stop_ids: Sequence[tuple[int, ...]]

    @property
    def size(self) -> int:
        return len(self.tokenizers)

    def decode(self, completions: Sequence[Sequence[Completion]]) -> list[list[str]]:
        """Texts of completions, [agent][candidate], without special tokens."""
        return [
            [tokenizer.decode(list(c.ids), skip_special_tokens=True) for c in row]
            for tokenizer, row in zip(self.tokenizers, completions)
        ]


def agent_name(agent: int) -> str:
    """Name of an agent's policy."""
    return f"agent_{agent}"


class JointSampler:
    """Samples and scores joint responses.

    Args:
        pool: the engines. team: the agents. oracle: the scores.
        run_seed: each request's seed is a hash of (run seed, stream, round, task, agent, candidate).
        oracle_on_error: "raise" ends the run; "invalid" counts the score as invalid.
        chunk_items: tasks in one submission; None: as many as make about 4096 requests.
    """

    def __init__(
        self, pool: RolloutPool, team: Team, oracle: Oracle, *, run_seed: int, oracle_on_error: str = "raise",
        chunk_items: int | None = None,
    ) -> None:  # fmt: skip
        self.pool, self.team, self._oracle, self._run_seed = pool, team, oracle, run_seed
        self._on_error, self._chunk_items = oracle_on_error, chunk_items
        self.oracle_errors = 0

    def sample(
        self, prompts: Sequence[JointPrompt], policies: dict[str, PolicyWeights], sampling: Sampling, *, stream: str,
        round: int, candidates: int, journal: Journal | None = None, progress: Callable[[int, int], None] | None = None,
        known: Known | None = None,
    ) -> list[SampledItem]:  # fmt: skip
        """Every agent's `candidates` responses to each task, scored; the order of `prompts` is kept.

        Args:
            policies: weights by agent name.
            stream: "target", "comparator" or "eval"; streams never share a seed.
            journal: gets every completion and score as it arrives.
            progress: told (tasks scored, tokens sampled).
            known: what an interrupted run sampled and scored; it is taken over where its seed is the same.
        """
        walk = _Walk(self, policies, sampling, stream, round, candidates, journal, progress, known or Known())
        chunk = self._chunk_items or max(1, REQUESTS_PER_CHUNK // (candidates * self.team.size))
        done: list[SampledItem] = []
        try:
            for start in range(0, len(prompts), chunk):
                done += walk.fill(prompts[start : start + chunk])
            walk.take_all()
        finally:
            walk.close()
        return done

    def score(self, joint: JointPrompt, texts: list[str]) -> Score:
        """One joint response's score, an error as `oracle_on_error` says."""
        try:
            return self._oracle.score(joint.item, joint.index, [p.text for p in joint.prompts], texts)
        except OracleError:
            if self._on_error == "raise":
                raise
            self.oracle_errors += 1
            return INVALID

    def requests(self, keys: Sequence[tuple[SampledItem, int, int]], stream: str, round: int) -> list[Request]:
        """A request, with a seed of its own, for each (task, agent, candidate)."""
        team = self.team
        return [
            Request(
                agent_name(i), s.joint.prompts[i].ids, team.token_limits[i],
                seed_of(self._run_seed, stream, round, s.joint.index, i, j), team.stop_ids[i],
            )
            for s, i, j in keys
        ]  # fmt: skip


class _Walk:
    """One call of `JointSampler.sample`: what is being sampled, what is being scored, what is on disk."""

    def __init__(
        self, sampler: JointSampler, policies: dict[str, PolicyWeights], sampling: Sampling, stream: str, round: int,
        candidates: int, journal: Journal | None, progress: Callable[[int, int], None] | None, known: Known,
    ) -> None:  # fmt: skip
        self._known = known
        self._sampler, self._policies, self._sampling = sampler, policies, sampling
        self._stream, self._round, self._candidates = stream, round, candidates
        self._journal, self._progress = journal, progress
        self._scorer = ThreadPoolExecutor(1, "oracle")
        self._jobs: dict[Future[None], SampledItem] = {}
        self._failed = False

    def fill(self, prompts: Sequence[JointPrompt]) -> list[SampledItem]:
        """Samples one chunk; each task goes to the scorer as soon as its last completion is there."""
        size, sampler = self._sampler.team.size, self._sampler
        part = [SampledItem(joint, [[None] * self._candidates for _ in range(size)]) for joint in prompts]  # type: ignore[list-item]
        keys = [(s, i, j) for s in part for i in range(size) for j in range(self._candidates)]
        requests = sampler.requests(keys, self._stream, self._round)
        missing = {id(s): self._candidates * size for s in part}
        for k in self._take_known(keys, requests):
            self._place(keys[k], missing)
        left = [k for k, (s, i, j) in enumerate(keys) if s.completions[i][j] is None]
        for position, completion in sampler.pool.generate([requests[k] for k in left], self._policies, self._sampling):
            k = left[position]
            sampled, agent, candidate = keys[k]
            sampled.completions[agent][candidate] = completion
            if self._journal:
                self._journal.append(
                    "completion", stream=self._stream, round=self._round, item=sampled.joint.index, agent=agent,
                    candidate=candidate, seed=requests[k].seed, ids=completion.ids, finish=completion.finish_reason,
                    version=completion.version,
                )  # fmt: skip
            self._place(keys[k], missing)
            for job in [job for job in self._jobs if job.done()]:
                self._take(job)
        return part

    def _take_known(self, keys: Sequence[tuple[SampledItem, int, int]], requests: Sequence[Request]) -> list[int]:
        """Fills in what was sampled before; returns which."""
        taken = []
        for k, ((sampled, agent, candidate), request) in enumerate(zip(keys, requests)):
            seed, completion = self._known.completions.get(
                (self._stream, self._round, sampled.joint.index, agent, candidate), (None, None)
            )
            if completion is not None and seed == request.seed:
                sampled.completions[agent][candidate] = completion
                taken.append(k)
        return taken

    def _place(self, key: tuple[SampledItem, int, int], missing: dict[int, int]) -> None:
        """One completion more is there; with its last one a task goes to the scorer."""
        sampled = key[0]
        missing[id(sampled)] -= 1
        if not missing[id(sampled)]:
            sampled.texts = self._sampler.team.decode(sampled.completions)
            self._jobs[self._scorer.submit(self._score, sampled)] = sampled

    def take_all(self) -> None:
        """Waits for the scores that are still being made."""
        for job in list(self._jobs):
            self._take(job)

    def close(self) -> None:
        """After an error, whatever was scored meanwhile is kept."""
        self._scorer.shutdown(cancel_futures=True)
        for sampled in self._jobs.values():
            self._write(sampled)
        if self._journal:
            self._journal.sync()

    def _score(self, sampled: SampledItem) -> None:
        """Fills `sampled.scores` one at a time, so that an error later on leaves those before it."""
        for j in range(self._candidates):
            if self._failed:
                return
            if (score := self._known.scores.get(self._score_key(sampled, j))) is not None:
                sampled.scores.append(score)
                continue
            try:
                sampled.scores.append(self._sampler.score(sampled.joint, [row[j] for row in sampled.texts]))
            except OracleError:
                self._failed = True
                raise

    def _take(self, job: Future[None]) -> None:
        job.result()
        sampled = self._jobs.pop(job)
        self._write(sampled)
        if self._progress:
            self._progress(1, sum(len(c.ids) for row in sampled.completions for c in row))

    def _write(self, sampled: SampledItem) -> None:
        if not self._journal:
            return
        for j, score in enumerate(sampled.scores):
            if self._score_key(sampled, j) in self._known.scores:
                continue
            raw, value = (x if math.isfinite(x) else None for x in (score.raw, score.value))
            self._journal.append(
                "score", stream=self._stream, round=self._round, item=sampled.joint.index, candidate=j, raw=raw, value=value
            )

    def _score_key(self, sampled: SampledItem, candidate: int) -> tuple[str, int, int, int]:
        return self._stream, self._round, sampled.joint.index, candidate


@dataclass(frozen=True)
class Collected:
    """The pairs of a round, with what happened on the way."""

    pairs: list[PreferencePair]
    sampled: list[SampledItem]
    ties: int
    invalid: int
    scores: int

    @property
    def score_mean(self) -> float:
        finite = [s.value for item in self.sampled for s in item.scores if s.valid]
        return math.fsum(finite) / len(finite) if finite else math.nan

    def lengths(self, side: str) -> list[float]:
        """Mean tokens of the winners' or losers' completions, per agent."""
        agents = range(len(self.pairs[0].tokens)) if self.pairs else ()
        return [sum(len(getattr(p.tokens[i], side)) for p in self.pairs) / len(self.pairs) for i in agents]


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
    scores = [s for item in sampled for s in item.scores]
    invalid = sum(not s.valid for s in scores)
    if invalid > max_invalid_fraction * len(scores):
        first = next(item.joint.index for item in sampled if any(not s.valid for s in item.scores))
        raise InvalidScoresError(
            f"{invalid} of {len(scores)} oracle scores are NaN or infinite (first at task {first}), more than"
            f" max_invalid_fraction = {max_invalid_fraction} allows; the scores so far are in the journal"
        )
    pairs, ties = [], 0
    for item in sampled:
        values = [s.value if s.valid else math.nan for s in item.scores]
        ties += count_ties(values)
        generator = generator_of(run_seed, "pair_selection", round, item.joint.index)
        pairs += [make_pair(item, w, lo) for w, lo in select_pairs(values, mode, cap, generator)]
    return Collected(pairs, list(sampled), ties, invalid, len(scores))
