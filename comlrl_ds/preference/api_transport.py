"""One HTTP request at a time, with what to do when it fails: retries, waits, redirects, reasons without keys."""

from __future__ import annotations

import asyncio
import json
import logging
import math
import random
import time
from collections.abc import Callable
from datetime import UTC
from email.utils import parsedate_to_datetime
from typing import Any, TypeVar

import httpx

from comlrl_ds.config.api_settings import APISettings, Scrubber

RETRIED = frozenset({408, 409, 425, 429})
MAX_REDIRECTS = 3
LONGEST_REASON = 300

T = TypeVar("T")


class Fault(Exception):
    """Why a request failed; `retried` says whether another try may help, `wait` for how many seconds the server asked.

    Its text may hold what a server echoed: `reason` is for messages only after scrubbing, which `fetch` does.
    """

    def __init__(self, reason: str, *, retried: bool, status: int | None = None, wait: float | None = None) -> None:
        super().__init__(reason)
        self.reason, self.retried, self.status, self.wait, self.attempts = reason, retried, status, wait, 0


class Transport:
    """Connections to the endpoint, kept open between requests. All methods belong to one event loop.

    Args:
        scrub: takes secrets out of reasons and out of what httpx and httpcore log.
    """

    def __init__(self, settings: APISettings, scrub: Scrubber) -> None:
        self._settings, self._scrub = settings, scrub
        self._jitter = random.Random()  # of its own: waiting must not move anybody's random numbers
        self._log_filter = _ScrubbedLogs(scrub)
        self._log_filter.install()
        connections = settings.concurrency
        # Each try is timed as a whole, not by httpx: a server that sends a byte now and then is late too.
        self._client = httpx.AsyncClient(
            limits=httpx.Limits(max_connections=connections, max_keepalive_connections=connections),
            timeout=None,
            follow_redirects=False,
        )

    async def close(self) -> None:
        await self._client.aclose()
        self._log_filter.remove()

    async def fetch(
        self, url: str, headers: dict[str, str], body: bytes, read: Callable[[Any], T], stop: asyncio.Event
    ) -> tuple[T, int] | Fault:
        """(what `read` takes from the parsed answer, tries made), or the fault that ended the last try.

        Args:
            read: raises Fault where the answer holds too little.
            stop: once set, nothing is tried again.
        """
        attempt = 0
        while True:
            attempt += 1
            try:
                async with asyncio.timeout(self._settings.timeout):
                    return await self._attempt(url, headers, body, read), attempt
            except TimeoutError:
                fault = Fault(f"no answer within {self._settings.timeout:g} s", retried=True)
            except httpx.RequestError as error:
                fault = Fault(f"{type(error).__name__}: {error}", retried=True)
            except Fault as error:
                fault = error
            fault.attempts, fault.reason = attempt, self._shortened(fault.reason)
            if not fault.retried or attempt > self._settings.max_retries or stop.is_set():
                return fault
            try:
                async with asyncio.timeout(self._wait(attempt, fault.wait)):
                    await stop.wait()
                return fault
            except TimeoutError:
                pass

    def _wait(self, attempt: int, asked: float | None) -> float:
        """Seconds until the next try: at least what the server asked for, else from the upper half of the back-off."""
        longest, backoff = self._settings.max_wait, self._settings.backoff * 2.0 ** (attempt - 1)
        return min(longest, max(asked or 0.0, min(longest, backoff) * self._jitter.uniform(0.5, 1.0)))

    async def _attempt(self, url: str, headers: dict[str, str], body: bytes, read: Callable[[Any], T]) -> T:
        response = await self._client.post(url, content=body, headers=headers)
        for _ in range(MAX_REDIRECTS):
            if not response.has_redirect_location:
                break
            response = await self._client.post(_redirected(response), content=body, headers=headers)
        status = response.status_code
        if not 200 <= status < 300:
            wait = retry_after(response.headers.get("retry-after"), time.time())
            again = status in RETRIED or status >= 500
            raise Fault(f"HTTP {status}: {response.text}", retried=again, status=status, wait=wait)
        try:
            answer = json.loads(response.content)
        except (ValueError, RecursionError):
            raise Fault(f"the answer is not JSON: {response.text}", retried=True, status=status) from None
        try:
            return read(answer)
        except Fault as fault:
            raise Fault(f"{fault.reason}: {response.text}", retried=True, status=status) from None

    def _shortened(self, reason: str) -> str:
        """The start of a reason on one line, scrubbed before it is cut: half a key is still part of one."""
        text = " ".join(self._scrub(reason).split())
        return text if len(text) <= LONGEST_REASON else text[:LONGEST_REASON] + "…"


def _redirected(response: httpx.Response) -> httpx.URL:
    """Where a redirect leads that keeps method and server; no other server gets the key or the task."""
    here, status = response.request.url, response.status_code
    try:
        there = here.join(response.headers["location"])
    except httpx.InvalidURL:
        raise Fault(f"HTTP {status} leads to an invalid address", retried=False, status=status) from None
    if (there.scheme, there.host, there.port) != (here.scheme, here.host, here.port):
        server = f"{there.scheme}://{there.netloc.decode('ascii')}"
        reason = f"HTTP {status} leads to another host, {server}, which was sent nothing; comparator_api_url can name it"
        raise Fault(reason, retried=False, status=status)
    if status not in (307, 308):
        raise Fault(f"HTTP {status} leads to {there.path}; write that in comparator_api_url", retried=False, status=status)
    return there


def retry_after(value: str | None, now: float) -> float | None:
    """Seconds that a Retry-After header asks for: a number, or an HTTP date against `now`; None where it asks nothing."""
    try:
        seconds = float(value or "")
    except ValueError:
        try:
            date = parsedate_to_datetime(value or "")
        except (TypeError, ValueError):
            return None
        seconds = (date if date.tzinfo else date.replace(tzinfo=UTC)).timestamp() - now
    return max(0.0, seconds) if math.isfinite(seconds) else None


class _ScrubbedLogs(logging.Filter):
    """httpx logs URLs and httpcore the headers that servers send; this takes the secrets out."""

    NAMES = ("httpx", "httpcore.connection", "httpcore.http11", "httpcore.proxy", "httpcore.socks")

    def __init__(self, scrub: Scrubber) -> None:
        super().__init__()
        self._scrub = scrub

    def filter(self, record: logging.LogRecord) -> bool:
        record.msg, record.args = self._scrub(record.getMessage()), ()
        return True

    def install(self) -> None:
        for name in self.NAMES:
            logging.getLogger(name).addFilter(self)

    def remove(self) -> None:
        for name in self.NAMES:
            logging.getLogger(name).removeFilter(self)
