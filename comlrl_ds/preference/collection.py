"""Joint responses of the team, and of who it is compared with, scored by the oracle while the rest is still being sampled."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field

from comlrl_ds.maths.seeds import seed_of
from comlrl_ds.preference.asked import identity_of, request_mark, score_mark
from comlrl_ds.preference.journal import Journal, Known
from comlrl_ds.preference.oracle import INVALID, MISSING, Oracle, OracleError, OracleResultError, Score
from comlrl_ds.preference.prompts import JointPrompt
from comlrl_ds.preference.teams import Read, Team
from comlrl_ds.rollout.base import Completion, PolicyWeights, Request, RequestsRefused, RolloutError, Sampling
from comlrl_ds.rollout.pool import RolloutPool

REQUESTS_PER_CHUNK = 4096
TARGET, COMPARATOR, EVAL = "target", "comparator", "eval"


@dataclass
class SampledItem:
    """One task with candidates of one side.

    Attributes:
        completions: [writer][candidate]; empty where answers came as texts.
        texts: [role][candidate], what the oracle reads. scores: [candidate]; `MISSING` where there is no answer.
        written: [writer][candidate]; the same as `texts` where each role has its writer.
        converted: [agent][candidate], the texts in the agents' tokens, where others wrote them.
        cut, unfinished: as in `Read`.
    """

    joint: JointPrompt
    completions: list[list[Completion]]
    texts: list[list[str]] = field(default_factory=list)
    scores: list[Score] = field(default_factory=list)
    written: list[list[str]] = field(default_factory=list)
    missing: frozenset[int] = frozenset()
    stream: str = TARGET
    converted: list[list[Completion]] | None = None
    cut: int = 0
    unfinished: int = 0

    @property
    def values(self) -> list[float]:
        return [s.value for s in self.scores]

    @property
    def tokens(self) -> int:
        return sum(len(c.ids) for row in self.completions for c in row)

    def take(self, read: Read) -> None:
        """The candidates as texts."""
        self.written, self.texts, self.missing = read.written, read.texts, read.missing
        self.converted, self.cut, self.unfinished = read.completions, read.cut, read.unfinished


@dataclass(frozen=True)
class Side:
    """Who answers: the policies' weights by name, their prompts, and the stream that seeds come from.

    Streams ("target", "comparator", "eval") never share a seed.
    """

    team: Team
    policies: dict[str, PolicyWeights]
    prompts: Sequence[JointPrompt]
    candidates: int
    stream: str


# (side, task, writer, candidate)
_Key = tuple[Side, SampledItem, int, int]


class JointSampler:
    """Samples and scores joint responses.

    Args:
        pool: the engines. team: the agents. oracle: the scores.
        run_seed: each request's seed is a hash of (run seed, stream, round, task, agent, candidate).
        oracle_on_error: "raise" ends the run; "invalid" counts the score as invalid.
        chunk_items: tasks in one submission; None: as many as make about 4096 requests.
        oracle_workers: tasks that are scored at a time.

    Attributes:
        function: who gives the scores.
        not_reused: what an interrupted run left that something else was asked for: "completions", and scores by the name
            of the function that gave them.
    """

    def __init__(
        self, pool: RolloutPool, team: Team, oracle: Oracle, *, run_seed: int, oracle_on_error: str = "raise",
        chunk_items: int | None = None, oracle_workers: int = 1,
    ) -> None:  # fmt: skip
        self.pool, self.team, self._oracle, self._run_seed = pool, team, oracle, run_seed
        self._on_error, self._chunk_items, self.oracle_workers = oracle_on_error, chunk_items, oracle_workers
        self.oracle_errors = 0
        self.function = identity_of(oracle)
        self.not_reused: Counter[str] = Counter()
        self._counting = threading.Lock()

    def sample(
        self, prompts: Sequence[JointPrompt], policies: dict[str, PolicyWeights], sampling: Sampling, *, stream: str,
        round: int, candidates: int, journal: Journal | None = None, progress: Callable[[int, int], None] | None = None,
        known: Known | None = None,
    ) -> list[SampledItem]:  # fmt: skip
        """The team's `candidates` responses to each task, scored; the order of `prompts` is kept. See `sample_sides`."""
        side = Side(self.team, policies, prompts, candidates, stream)
        return self.sample_sides([side], sampling, round=round, journal=journal, progress=progress, known=known)[0]

    def sample_sides(
        self, sides: Sequence[Side], sampling: Sampling, *, round: int, journal: Journal | None = None,
        progress: Callable[[int, int], None] | None = None, known: Known | None = None,
        answered: Iterable[SampledItem] = (), scored: bool = True,
    ) -> list[list[SampledItem]]:  # fmt: skip
        """Every side's responses to its prompts, scored; both sides of a chunk of tasks are one submission.

        Args:
            journal: gets every completion and score as it arrives.
            progress: told (tasks of one side scored, tokens sampled).
            known: what an interrupted run sampled and scored; it is reused where the same would be asked for.
            answered: further responses that somebody else gives meanwhile, as texts; they are scored as the others.
            scored: whether the oracle is asked.

        Returns:
            a list for each side, and a last one of `answered`.
        """
        walk = _Walk(self, sampling, round, journal, progress, known or Known(), scored)
        requests = max(1, sum(side.candidates * side.team.size for side in sides))
        chunk = self._chunk_items or max(1, REQUESTS_PER_CHUNK // requests)
        done: list[list[SampledItem]] = [[] for _ in sides]
        others: list[SampledItem] = []
        try:
            for start in range(0, max((len(side.prompts) for side in sides), default=0), chunk):
                parts = walk.fill(sides, slice(start, start + chunk))
                for whole, part in zip(done, parts):
                    whole += part
            for item in answered:
                others.append(item)
                if scored:
                    walk.score(item)
            walk.take_all()
        finally:
            walk.close()
        return [*done, others]

    def score(self, joint: JointPrompt, texts: list[str]) -> Score:
        """One joint response's score, an error as `oracle_on_error` says."""
        try:
            return self._oracle.score(joint.item, joint.index, joint.role_texts, texts)
        except OracleError as error:
            if self._on_error == "raise" or isinstance(error, OracleResultError):
                raise
            with self._counting:
                self.oracle_errors += 1
            return INVALID

    def count_not_reused(self, function: str) -> None:
        """Counts a score that another function gave."""
        with self._counting:
            self.not_reused[function] += 1

    def request(self, side: Side, joint: JointPrompt, round: int, writer: int, candidate: int) -> Request:
        """What one candidate of a task asks for, with a seed of its own."""
        team = side.team
        return Request(
            team.name(writer), joint.prompts[writer].ids, team.token_limits[writer],
            seed_of(self._run_seed, side.stream, round, joint.index, writer, candidate), team.stop_ids[writer],
        )  # fmt: skip


class _Walk:
    """One call of `JointSampler.sample_sides`: what is being sampled, what is being scored, what is on disk."""

    def __init__(
        self, sampler: JointSampler, sampling: Sampling, round: int, journal: Journal | None,
        progress: Callable[[int, int], None] | None, known: Known, scored: bool,
    ) -> None:  # fmt: skip
        self._known, self._sampler, self._sampling, self._round = known, sampler, sampling, round
        self._scored = scored
        self._journal, self._progress = journal, progress
        self._scorer = ThreadPoolExecutor(sampler.oracle_workers, "oracle")
        self._jobs: dict[Future[None], SampledItem] = {}
        self._failed = False

    def fill(self, sides: Sequence[Side], chunk: slice) -> list[list[SampledItem]]:
        """Samples one chunk; each task goes to the scorer as soon as its last completion is there."""
        parts = [
            [
                SampledItem(joint, [[None] * side.candidates for _ in range(side.team.size)], stream=side.stream)  # type: ignore[list-item]
                for joint in side.prompts[chunk]
            ]
            for side in sides
        ]
        keys = [
            (side, item, i, j)
            for side, part in zip(sides, parts)
            for item in part
            for i in range(side.team.size)
            for j in range(side.candidates)
        ]
        requests = [self._sampler.request(side, item.joint, self._round, i, j) for side, item, i, j in keys]
        marks = [
            request_mark(request, self._sampling, side.policies[request.policy]) for (side, *_), request in zip(keys, requests)
        ]
        missing = {id(item): side.candidates * side.team.size for side, part in zip(sides, parts) for item in part}
        policies = {name: weights for side in sides for name, weights in side.policies.items()}
        left = [k for k, key in enumerate(keys) if not self._take_known(key, requests[k], marks[k], missing)]
        for position, completion in self._sampled([requests[k] for k in left], policies, [keys[k] for k in left]):
            k = left[position]
            side, item, writer, candidate = keys[k]
            if self._journal:
                self._journal.append(
                    "completion", stream=side.stream, round=self._round, item=item.joint.index, agent=writer,
                    candidate=candidate, seed=requests[k].seed, of=marks[k], ids=completion.ids,
                    finish=completion.finish_reason, version=completion.version,
                    **({"logprobs": completion.logprobs} if completion.logprobs else {}),
                )  # fmt: skip
            self._place(keys[k], completion, missing)
            for job in [job for job in self._jobs if job.done()]:
                self._take(job)
        return parts

    def _sampled(
        self, requests: Sequence[Request], policies: dict[str, PolicyWeights], keys: Sequence[_Key]
    ) -> Iterator[tuple[int, Completion]]:
        """What the engines give. A refused request ends the run after all others have been answered and journaled."""
        try:
            yield from self._sampler.pool.generate(requests, policies, self._sampling)
        except RequestsRefused as error:
            k, reason = error.refused[0]
            side, item, writer, candidate = keys[k]
            raise RolloutError(
                f"an engine refused {len(error.refused)} of {len(requests)} requests, first task {item.joint.index},"
                f" {side.team.name(writer)}, candidate {candidate} ({len(requests[k].prompt)} tokens, and"
                f" {requests[k].max_new_tokens} new ones): {reason}; all others are in the journal"
            ) from None

    def _take_known(self, key: _Key, request: Request, asked: str, missing: dict[int, int]) -> bool:
        """Places what was sampled before for the same request."""
        side, item, writer, candidate = key
        found = self._known.completions.get((side.stream, self._round, item.joint.index, writer, candidate))
        if found is None or (self._sampling.logprobs and not found[2].logprobs):
            return False
        if found[:2] != (request.seed, asked):
            self._sampler.not_reused["completions"] += 1
            return False
        self._place(key, found[2], missing)
        return True

    def _place(self, key: _Key, completion: Completion, missing: dict[int, int]) -> None:
        """One completion more is there; with its last one a task goes to the scorer."""
        side, item, writer, candidate = key
        item.completions[writer][candidate] = completion
        missing[id(item)] -= 1
        if not missing[id(item)]:
            item.take(side.team.read(item.joint, item.completions))
            if self._scored:
                self.score(item)
            elif self._progress:
                self._progress(1, item.tokens)

    def score(self, item: SampledItem) -> None:
        """Hands a task whose texts are there to the scorer."""
        self._jobs[self._scorer.submit(self._score, item)] = item

    def take_all(self) -> None:
        """Waits for the scores that are still being made."""
        for job in list(self._jobs):
            self._take(job)

    def close(self) -> None:
        """After an error, whatever was scored meanwhile is kept."""
        self._scorer.shutdown(cancel_futures=True)
        for item in self._jobs.values():
            self._write(item)
        if self._journal:
            self._journal.sync()

    def _score(self, item: SampledItem) -> None:
        """Fills `scores` one at a time, so that an error later on leaves those before it."""
        for j in range(len(item.texts[0])):
            if self._failed:
                return
            if j in item.missing:
                item.scores.append(MISSING)
            elif (score := self._known_score(item, j)) is not None:
                item.scores.append(score)
            else:
                try:
                    item.scores.append(self._sampler.score(item.joint, [row[j] for row in item.texts]))
                except OracleError:
                    self._failed = True
                    raise

    def _known_score(self, item: SampledItem, candidate: int) -> Score | None:
        """What the same function gave the same joint response before."""
        found = self._known.scores.get(self._score_key(item, candidate))
        if found is None:
            return None
        if found[:2] == (self._mark(item, candidate), self._sampler.function.mark):
            return found[2]
        if found[1] != self._sampler.function.mark:
            self._sampler.count_not_reused(self._known.functions.get(found[1], "another reward function"))
        return None

    @staticmethod
    def _mark(item: SampledItem, candidate: int) -> str:
        return score_mark(item.joint, [row[candidate] for row in item.texts])

    def _take(self, job: Future[None]) -> None:
        job.result()
        item = self._jobs.pop(job)
        self._write(item)
        if self._progress:
            self._progress(1, item.tokens)

    def _write(self, item: SampledItem) -> None:
        if not self._journal:
            return
        function = self._sampler.function
        for j, score in enumerate(item.scores):
            asked = self._mark(item, j)
            known = self._known.scores.get(self._score_key(item, j))
            if score is MISSING or (known is not None and known[:2] == (asked, function.mark)):
                continue
            if function.mark not in self._known.functions:
                self._known.functions[function.mark] = function.name
                self._journal.append("function", round=self._round, mark=function.mark, name=str(function))
            self._journal.append(
                "score", stream=item.stream, round=self._round, item=item.joint.index, candidate=j, of=asked, by=function.mark,
                raw=score.raw, value=score.value,
            )  # fmt: skip

    def _score_key(self, item: SampledItem, candidate: int) -> tuple[str, int, int, int]:
        return item.stream, self._round, item.joint.index, candidate
