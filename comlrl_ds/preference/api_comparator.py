"""Asks a comparator behind HTTP for responses: many requests at a time, answers handed over as they come."""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
import time
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from types import TracebackType
from typing import Any

import httpx

from comlrl_ds.config.api_settings import APISettings
from comlrl_ds.config.errors import ConfigError, Problem, nearest
from comlrl_ds.preference.api_formats import Answer, APIRequest, format_of
from comlrl_ds.preference.api_transport import Fault, Transport
from comlrl_ds.rollout.base import Sampling

logger = logging.getLogger(__name__)

# The same for every request, so the first few tell: wrong key, no money, not allowed, wrong address.
HOPELESS = frozenset({401, 402, 403, 404})
OF_THE_KEY = frozenset({401, 402, 403})
# Answers on their way are paid; so long they are waited for when the asking ends early.
GRACE_SECONDS = 5.0

AnswerKey = tuple[int, int, int, int]  # (round, item, agent, candidate)


class ComparatorAPIError(RuntimeError):
    """Too large a share of a collection's answers is missing."""


@dataclass(frozen=True)
class APIFailure:
    """What was given up: the last reason, tries made, the candidates without an answer, and the HTTP status if any."""

    reason: str
    attempts: int
    candidates: tuple[int, ...]
    status: int | None = None


@dataclass(frozen=True)
class APIAnswer:
    """One answer per candidate; None where the HTTP request that asked for it failed."""

    answers: tuple[Answer | None, ...]
    failures: tuple[APIFailure, ...] = ()

    @property
    def texts(self) -> tuple[str | None, ...]:
        return tuple(a.text if a else None for a in self.answers)


@dataclass
class APICounters:
    """Since the comparator was made.

    Attributes:
        requests: HTTP requests that ended. retries: those of them that asked again.
        failures: requests given up after their retries.
        answers: texts that came. known: texts taken from the journal.
        seconds: wall time during which answers were awaited.
    """

    requests: int = 0
    retries: int = 0
    failures: int = 0
    answers: int = 0
    known: int = 0
    seconds: float = 0.0


class APIComparator:
    """A comparator behind HTTP. It works in a thread of its own, while the trainer samples and scores.

    Args:
        settings: where and how to ask.
        sampling: temperature, top_p and top_k, as far as the format sends them.
        on_answer: told (round, item, agent, candidate, answer) of every answer when it arrives, in the comparator's thread:
            whatever it writes to has to be safe there. An error of it ends the asking.
    """

    def __init__(
        self, settings: APISettings, sampling: Sampling, on_answer: Callable[[int, int, int, int, Answer], None] | None = None
    ) -> None:
        self.settings, self.counters = settings, APICounters()
        self._format, self._on_answer = format_of(settings, sampling), on_answer
        self._scrub_answer = settings.answer_scrubber()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._transport: Transport | None = None
        self._asking: Asking | None = None
        self._told = False

    def ask(self, requests: Sequence[APIRequest], *, round: int = 0, known: Mapping[AnswerKey, Answer] | None = None) -> Asking:
        """Starts asking at once; gives (index into `requests`, answer or failure) as they finish.

        A request has finished when all its candidates have; it is a failure when none of them has a text. The limit
        `max_failure_fraction` is one on the candidates of a call, so a collection is best asked for in one call.

        Args:
            known: the journal's answers by (round, item, agent, candidate); they are not asked for again.

        Raises:
            ComparatorAPIError: (by the iterator) more answers are missing than the settings allow, or the first
                `concurrency` requests were all refused for a reason that holds for every other.
            ConfigError: a task lacks one of `item_fields`.
        """
        if self._asking is not None and not self._asking.finished:
            raise RuntimeError("the comparator is still asking; finish or close that iterator first")
        self._check_fields(requests)
        self._tell_what_is_sent(requests)
        if self._loop is None:
            self._transport = Transport(self.settings, self.settings.scrubber())
            self._loop = asyncio.new_event_loop()
            self._thread = threading.Thread(target=self._loop.run_forever, name="comparator-api", daemon=True)
            self._thread.start()
        pending = [
            _Pending(r, [(known or {}).get((round, r.index, r.agent, j)) for j in range(r.candidates)]) for r in requests
        ]
        for p in pending:
            missing = [j for j, answer in enumerate(p.answers) if answer is None]
            self.counters.known += len(p.answers) - len(missing)
            size = max(1, self._format.per_request(len(missing)))
            p.parts = [missing[start : start + size] for start in range(0, len(missing), size)]
        self._asking = Asking(self._loop, self.settings, self.counters, pending, partial(self._fetch, round))
        return self._asking

    def close(self) -> None:
        """Ends the asking and closes the connections; a later `ask` opens new ones."""
        if self._asking is not None:
            self._asking.close()
        if self._loop is not None and self._thread is not None and self._transport is not None:
            asyncio.run_coroutine_threadsafe(self._transport.close(), self._loop).result()
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()
        self._loop = self._thread = self._transport = None

    def __enter__(self) -> APIComparator:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    async def _fetch(self, round: int, request: APIRequest, part: list[int], stop: asyncio.Event) -> list[Answer] | Fault:
        """Answers of the candidates in `part`, by one HTTP request and its retries; all or none of them."""
        assert self._transport is not None
        count = len(part)

        def read(answer: Any) -> list[Answer]:
            found = self._format.read(answer)
            if len(found) < count:
                few = f"{len(found)} answers instead of {count}"
                hint = " (comparator_api_max_n_per_request: 1 asks for one at a time)"
                raise Fault(few + hint * (self.settings.format == "openai" and count > 1), retried=True)
            return [a._replace(text=self._scrub_answer(a.text)) for a in found[:count]]

        got = await self._transport.fetch(*self._format.build(request, count), read, stop)
        attempts = got.attempts if isinstance(got, Fault) else got[1]
        self.counters.requests += attempts
        self.counters.retries += attempts - 1
        if isinstance(got, Fault):
            return got
        for j, answer in zip(part, got[0]):
            self.counters.answers += 1
            if self._on_answer:
                self._on_answer(round, request.index, request.agent, j, answer)
        return got[0]

    def _check_fields(self, requests: Sequence[APIRequest]) -> None:
        for name in self.settings.item_fields or ():
            for request in requests:
                if name not in request.item:
                    message = f"task {request.index} has no field {name!r}{nearest(name, list(map(str, request.item)))}"
                    raise ConfigError(Problem("comparator_api_item_fields", message))

    def _tell_what_is_sent(self, requests: Sequence[APIRequest]) -> None:
        if self._told or not requests:
            return
        self._told = True
        settings = self.settings
        place = settings.scrubber()(settings.place)
        if settings.format == "generic":
            fields = ", ".join(map(str, requests[0].item if settings.item_fields is None else settings.item_fields))
            advice = "" if settings.item_fields is not None else " (comparator_api_item_fields limits them)"
            logger.warning("the comparator API at %s is sent these fields of each task: %s%s", place, fields, advice)
        host = httpx.URL(settings.place).host
        is_near = host in ("localhost", "::1") or host.startswith("127.")
        if place.startswith("http://") and settings.credential() and not is_near:
            logger.warning("the key of the comparator API travels unencrypted to %s", place)


class Asking(Iterator[tuple[int, APIAnswer | APIFailure]]):
    """What one `APIComparator.ask` gives; `close` ends it early and keeps what arrives within seconds."""

    def __init__(
        self, loop: asyncio.AbstractEventLoop, settings: APISettings, counters: APICounters, pending: list[_Pending],
        fetch: Callable[[APIRequest, list[int], asyncio.Event], Coroutine[Any, Any, list[Answer] | Fault]],
    ) -> None:  # fmt: skip
        self.finished = False
        self._loop, self._settings, self._counters, self._pending, self._fetch = loop, settings, counters, pending, fetch
        self._done: queue.SimpleQueue[tuple[int, APIAnswer | APIFailure] | BaseException | None] = queue.SimpleQueue()
        self._stop = asyncio.Event()
        self._error: ComparatorAPIError | None = None
        self._total = sum(len(p.answers) for p in pending)
        self._missing = self._failed = self._hopeless = 0
        self._succeeded = False
        for k, p in enumerate(pending):
            if not p.parts:
                self._done.put((k, p.result()))
        self._work_left = iter([(k, part) for k, p in enumerate(pending) for part in p.parts])
        self._started = time.perf_counter()
        asyncio.run_coroutine_threadsafe(self._run(), loop)

    def __next__(self) -> tuple[int, APIAnswer | APIFailure]:
        if self.finished:
            raise StopIteration
        result = self._done.get()
        if isinstance(result, tuple):
            return result
        self._finish()
        raise StopIteration if result is None else result

    def close(self) -> None:
        """No request is sent any more; those on their way get a few seconds."""
        if not self.finished:
            self._loop.call_soon_threadsafe(self._stop.set)
            while isinstance(self._done.get(), tuple):
                pass
            self._finish()

    def _finish(self) -> None:
        self.finished = True
        self._counters.seconds += time.perf_counter() - self._started

    async def _run(self) -> None:
        workers = [asyncio.create_task(self._work()) for _ in range(self._settings.concurrency)]
        ended = asyncio.create_task(asyncio.wait(workers, return_when=asyncio.FIRST_EXCEPTION))
        stopped = asyncio.create_task(self._stop.wait())
        error: BaseException | None = None
        try:
            await asyncio.wait([ended, stopped], return_when=asyncio.FIRST_COMPLETED)
            if self._stop.is_set():
                await asyncio.wait(workers, timeout=GRACE_SECONDS)
        finally:
            for task in (*workers, ended, stopped):
                task.cancel()
            results = await asyncio.gather(*workers, ended, stopped, return_exceptions=True)
            error = next((r for r in results if isinstance(r, Exception)), None)
            self._done.put(error or self._error)

    async def _work(self) -> None:
        for k, part in self._work_left:
            if self._stop.is_set():
                return
            pending = self._pending[k]
            got = await self._fetch(pending.request, part, self._stop)
            if isinstance(got, Fault):
                self._fail(pending, part, got)
            else:
                self._succeeded = True
                for j, answer in zip(part, got):
                    pending.answers[j] = answer
            pending.ended += 1
            if pending.ended == len(pending.parts):
                self._done.put((k, pending.result()))

    def _fail(self, pending: _Pending, part: list[int], fault: Fault) -> None:
        """Counts a request that was given up, and ends the asking when there are too many."""
        request = pending.request
        tries = f" (tried {fault.attempts} times)" if fault.attempts > 1 else ""
        reason = f"task {request.index}, agent {request.agent}: {fault.reason}{tries}"
        pending.failures.append(APIFailure(reason, fault.attempts, tuple(part), fault.status))
        self._counters.failures += 1
        self._failed += 1
        self._missing += len(part)
        self._hopeless += fault.status in HOPELESS
        limit = self._settings.max_failure_fraction
        why = None
        if self._missing > limit * self._total:
            why = f"more than comparator_api_max_failure_fraction = {limit:g} allows"
        elif not self._succeeded and self._hopeless == self._failed >= self._settings.concurrency and limit < 1:
            why = "all of them so far, and no other would do better"
        if why and self._error is None:
            counts = f"{self._missing} of {self._total} answers of the comparator API failed"
            self._error = ComparatorAPIError(f"{counts}, {why}; the last: {reason}{self._remedy(fault)}")
            self._stop.set()

    def _remedy(self, fault: Fault) -> str:
        """What to do about a refusal that has to do with the key, after the reason."""
        if fault.status not in OF_THE_KEY:
            return ""
        if self._settings.key is not None:
            return "; check the key in comparator_api_key"
        if self._settings.key_env is not None:
            return f"; check the key in {self._settings.key_env}"
        return "; no key was sent: write the name of its environment variable in comparator_api_key_env"


@dataclass
class _Pending:
    """A request on its way: its answers so far, and the candidates that each of its HTTP requests asks for."""

    request: APIRequest
    answers: list[Answer | None]
    parts: list[list[int]] = field(default_factory=list)
    ended: int = 0
    failures: list[APIFailure] = field(default_factory=list)

    def result(self) -> APIAnswer | APIFailure:
        if not self.failures or any(answer is not None for answer in self.answers):
            return APIAnswer(tuple(self.answers), tuple(self.failures))
        last, attempts = self.failures[-1], sum(f.attempts for f in self.failures)
        return APIFailure(last.reason, attempts, tuple(range(len(self.answers))), last.status)
