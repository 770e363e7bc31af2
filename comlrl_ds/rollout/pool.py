"""All engines of a run behind one `generate`."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import wait

from comlrl_ds.rollout.base import (
    Completion,
    PolicyWeights,
    Request,
    RequestsRefused,
    RolloutEngine,
    RolloutError,
    Sampling,
    SyncReport,
)
from comlrl_ds.rollout.schedule import Segment, schedule

Wanted = tuple[RolloutEngine, PolicyWeights]

# Giving an engine other weights takes about as long as sampling so many tokens, for small and large models alike:
# both are bound by the passes over the weights.
SWAP_COST_TOKENS = 400.0


class RolloutPool:
    """Engines, and how work is spread over them.

    Args:
        engines: started engines.
        shape_of: says of a model folder which architecture it has; engines take weights of their own only.
        timeout_s: longest silence of all working engines.
        on_sync: told (policy, engine index, report) after each sync.
        move: makes engines hold policies, all at the same time where it can; None: one after the other by `sync_weights`.

    Attributes:
        interrupted: a generation has begun and not ended; no other can begin.
    """

    def __init__(
        self,
        engines: Sequence[RolloutEngine],
        shape_of: Callable[[str], str],
        timeout_s: float = 600,
        on_sync: Callable[[PolicyWeights, int, SyncReport], None] | None = None,
        move: Callable[[Sequence[Wanted]], list[SyncReport]] | None = None,
    ) -> None:
        self.engines, self._shape_of, self._timeout_s, self._on_sync = list(engines), shape_of, timeout_s, on_sync
        self._move = move or (lambda wanted: [engine.sync_weights(policy) for engine, policy in wanted])
        self.generated_tokens, self.generate_seconds = 0, 0.0
        self.interrupted = False

    def generate(
        self, requests: Sequence[Request], policies: dict[str, PolicyWeights], sampling: Sampling
    ) -> Iterator[tuple[int, Completion]]:
        """(index, completion) as completions finish; all engines work at the same time.

        Raises:
            RequestsRefused: (after the last completion) engines refused some requests.
        """
        if not requests:
            return
        if self.interrupted:
            raise RolloutError(
                "a generation was interrupted, and its engines are still at it; close() the trainer for new ones"
            )
        self.interrupted = True  # until the last completion is handed over
        by_key: dict[str, list[PolicyWeights]] = {}
        for name in dict.fromkeys(r.policy for r in requests):
            by_key.setdefault(policies[name].key, []).append(policies[name])
        plan = schedule(
            [r.cost for r in requests],
            [policies[r.policy].key for r in requests],
            [e.held for e in self.engines],
            {key: sorted({e for p in same for e in self.engines_for(p)}) for key, same in by_key.items()},
            SWAP_COST_TOKENS,
        )
        started = time.perf_counter()
        tokens = 0
        refused: list[tuple[int, str]] = []
        waiting = {e: list(segments) for e, segments in zip(self.engines, plan) if segments}
        current: dict[RolloutEngine, Segment] = {}

        def bearer(engine: RolloutEngine, key: str) -> PolicyWeights:
            """Of the policies with these weights one that the engine takes."""
            return next(p for p in by_key[key] if engine.held == key or self._takes(engine, p))

        def begin(engine: RolloutEngine) -> None:
            current[engine] = segment = waiting[engine].pop(0)
            self.bring([(engine, bearer(engine, segment.key))])
            engine.submit([requests[k] for k in segment.indices], sampling)

        # An engine that holds its weights already starts before the others are synced, which happens in one go.
        stale = [e for e in waiting if waiting[e][0].key != e.held]
        for engine in [e for e in waiting if e not in stale]:
            begin(engine)
        self.bring([(e, bearer(e, waiting[e][0].key)) for e in stale])
        for engine in stale:
            begin(engine)
        while current:
            for engine in self._ready(list(current)):
                segment = current[engine]
                try:
                    finished = engine.receive()
                except RequestsRefused as error:
                    refused += [(segment.indices[k], reason) for k, reason in error.refused]
                    finished = None
                if finished is None:
                    del current[engine]
                    if waiting[engine]:
                        begin(engine)
                    continue
                for k, completion in finished:
                    tokens += len(completion.ids)
                    yield segment.indices[k], completion
        self.interrupted = False
        self.generated_tokens += tokens
        self.generate_seconds += time.perf_counter() - started
        if refused:
            raise RequestsRefused(sorted(refused))

    def _ready(self, working: list[RolloutEngine]) -> list[RolloutEngine]:
        """Those of the working engines whose `receive` will not wait for long."""
        here = [e for e in working if e.connection is None]
        if here:
            return here
        connections = {e.connection: e for e in working}
        ready = wait([c for c in connections if c is not None], timeout=self._timeout_s)
        if not ready:
            raise RolloutError(f"no engine has answered for {self._timeout_s:.0f} s (rollout.timeout_s)")
        return [connections[c] for c in ready]  # type: ignore[index]

    def engines_for(self, policy: PolicyWeights) -> list[int]:
        """Indices of the engines that take the policy: of its architecture, and not another policy's alone."""
        fitting = [k for k, e in enumerate(self.engines) if self._takes(e, policy) or e.held == policy.key]
        if not fitting:
            raise RolloutError(f"no engine takes {policy.name} or has its architecture ({policy.source})")
        return fitting

    def _takes(self, engine: RolloutEngine, policy: PolicyWeights) -> bool:
        bound = engine.serves is not None and policy.name not in engine.serves
        return not bound and self._shape_of(policy.source) == self._shape_of(engine.source)

    def bring(self, wanted: Sequence[Wanted]) -> None:
        """Makes each engine hold the policy's weights, unless it does."""
        wanted = [(engine, policy) for engine, policy in wanted if engine.held != policy.key]
        for (engine, policy), report in zip(wanted, self._move(wanted) if wanted else []):
            if self._on_sync:
                self._on_sync(policy, self.engines.index(engine), report)

    def prompt_logprobs(self, policy: PolicyWeights, rows: Sequence[Sequence[int]]) -> list[list[float]]:
        """Log-probs of rows by an engine that holds the policy, the first that does so already if any."""
        fitting = [self.engines[k] for k in self.engines_for(policy)]
        engine = next((e for e in fitting if e.held == policy.key), fitting[0])
        self.bring([(engine, policy)])
        return engine.prompt_logprobs(rows)

    def shutdown(self) -> None:
        for engine in self.engines:
            engine.shutdown()
