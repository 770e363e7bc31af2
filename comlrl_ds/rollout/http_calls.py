"""The calls that a run makes to vLLM's HTTP server: log-probs, and a weight sync beside the requests of other clients.

A server that computes while its weights are on their way crashes, and prompts that it cached before would be continued with
the new weights. So a sync pauses the server until its open requests are finished, sends, drops the cached prompts, and lets
the requests go that arrived meanwhile, also where it fails.
"""

from __future__ import annotations

import contextlib
import os
import re
import time
from collections.abc import Sequence
from typing import Any

import httpx

from comlrl_ds.cluster.progress import tick
from comlrl_ds.rollout.base import RolloutError

HOW = (
    "start it with VLLM_SERVER_DEV_MODE=1, VLLM_PLUGINS=comlrl_ds, --generation-config vllm and"
    """ --weight-transfer-config '{"backend": "host"}'"""
)
# vLLM's name of the weights that a server started with.
FIRST_VERSION = "default"
# Between two tries of what a server refuses for now.
RETRY_S = 0.2
# What a server has to take up its work again after a sync that failed.
ABANDON_S = 5.0

# What a server has answered does not change while it runs.
_LIMITS: dict[str, int] = {}


class NoSuchRoute(RolloutError):
    """The server has no such path."""


class NotInTime(RolloutError):
    """The server has not answered."""


class Unreachable(RolloutError):
    """There is no connection to the server."""


def server_limit(url: str) -> int | None:
    """Longest prompt + completion of a server, as it says itself; None where it does not answer yet, or does not say."""
    if url not in _LIMITS:
        calls = HTTPCalls(url, timeout_s=3)
        try:
            limit = calls.served().get("max_model_len")
        except RolloutError:
            return None
        finally:
            calls.close()
        if isinstance(limit, int):
            _LIMITS[url] = limit
    return _LIMITS.get(url)


class HTTPCalls:
    """The calls of vLLM's weight transfer, and log-probs, over HTTP. `VLLM_API_KEY` is sent where it is set.

    Args:
        url: of the server. timeout_s: longest answer, and what a sync waits for requests of others in all.
        probe: rows whose log-probs a finished sync reports.
    """

    def __init__(self, url: str, timeout_s: float, probe: Sequence[Sequence[int]] = ()) -> None:
        key = os.environ.get("VLLM_API_KEY")
        limits = httpx.Limits(max_connections=None)
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        self.url, self.probe_rows, self.model, self.timeout_s = url.rstrip("/"), probe, "", timeout_s
        self._client = httpx.Client(base_url=self.url, timeout=timeout_s, limits=limits, headers=headers)
        self._paused = self._updating = False
        self._patience = timeout_s

    def ask(self, method: str, path: str, body: Any = None, timeout_s: float | None = None) -> Any:
        """The JSON of an answer; None of an empty one.

        Raises:
            RolloutError: no answer, or an error; names the server. NoSuchRoute, NotInTime and Unreachable are such.
        """
        try:
            answer = self._client.request(method, path, json=body, timeout=self.timeout_s if timeout_s is None else timeout_s)
        except httpx.TimeoutException:
            raise NotInTime(f"the engine at {self.url} has not answered in time (rollout.timeout_s)") from None
        except httpx.HTTPError as error:
            raise Unreachable(f"the engine at {self.url}: {error or type(error).__name__}") from None
        tick()
        if answer.status_code == 404:
            raise NoSuchRoute(f"the engine at {self.url} has no {path}; {HOW}")
        if answer.is_error:
            raise RolloutError(f"the engine at {self.url}: {answer.status_code} {answer.text[:300]}")
        try:
            return answer.json() if answer.content else None
        except ValueError:
            raise RolloutError(f"the engine at {self.url} answered {path} with no JSON: {answer.text[:100]!r}") from None

    # --- a sync: start, any number of updates, finish; or abandon
    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        self.ask("POST", "/init_weight_transfer_engine", {"init_info": init_info})

    def start_weight_update(self) -> None:
        """Waits until no request is open, keeps new ones waiting, and begins a sync."""
        self._pause()
        self._updating = True
        self.ask("POST", "/start_weight_update")

    def update_weights(self, update_info: dict[str, Any]) -> None:
        self.ask("POST", "/update_weights", {"update_info": update_info})

    def finish_weight_update(self, version: str) -> dict[str, Any]:
        """{"version", "probe"} that the server reports with the new weights, once nothing of the old ones is cached."""
        self.ask("POST", "/finish_weight_update", {"weight_version": version})
        self._updating = False
        self._reset_prefix_cache()
        self._resume(self.timeout_s)
        return {"version": self.version(), "probe": self.logprobs(self.probe_rows) if self.probe_rows else []}

    def abandon_weight_update(self) -> str:
        """Ends a sync that failed, so that the server's other clients are served again.

        Layers that were not sent keep the weights that they had, under a version that no run takes for its own.

        Returns:
            What is left to the user; empty where the server works again.
        """
        end = time.monotonic() + ABANDON_S
        left = lambda: max(0.1, end - time.monotonic())  # noqa: E731
        if self._updating:
            self._updating = False
            mark = "weights@an unfinished sync"
            # The server may be what failed: each step that it still takes helps the next run, and none is owed.
            for path, body in (
                ("/update_weights", {"update_info": {"tensors": [], "abandon": True}}),
                ("/finish_weight_update", {"weight_version": mark}),
                ("/update_weight_version", {"new_version": mark}),
            ):
                with contextlib.suppress(RolloutError):
                    self.ask("POST", path, body, left() / 2)
        try:
            self._resume(left())
        except Unreachable:
            return ""  # it is gone, and its requests with it
        except RolloutError as error:
            return f"{self.url} stays paused ({error}); send POST /resume to it, or restart it"
        return ""

    def _pause(self) -> None:
        started = time.monotonic()
        self._patience = self.timeout_s
        self._paused = True  # also where the answer does not come
        try:
            self.ask("POST", "/pause?mode=wait&clear_cache=false")
        except Unreachable:
            self._paused = False
            raise
        except NoSuchRoute:
            self._paused = False
            self._wait_for_requests(started + self.timeout_s)
        except NotInTime:
            raise NotInTime(
                f"the engine at {self.url} has not finished its open requests within {self.timeout_s:.0f} s (rollout.timeout_s)"
            ) from None
        self._patience -= time.monotonic() - started

    def _wait_for_requests(self, end: float) -> None:
        """The same for a server without /pause: until its counters show no request. One without counters is taken as idle."""
        while (count := self._open_requests()) > 0:
            if time.monotonic() > end:
                raise NotInTime(
                    f"the engine at {self.url} still has {count:.0f} open requests after {self.timeout_s:.0f} s"
                    " (rollout.timeout_s)"
                )
            time.sleep(RETRY_S)

    def _open_requests(self) -> float:
        try:
            answer = self._client.get("/metrics")
        except httpx.HTTPError as error:
            raise Unreachable(f"the engine at {self.url}: {error or type(error).__name__}") from None
        tick()
        found = re.findall(r"^vllm:num_requests_(?:running|waiting)(?:\{.*\})? ([-+.\deE]+)$", answer.text, re.MULTILINE)
        return 0 if answer.is_error else sum(map(float, found))

    def _reset_prefix_cache(self) -> None:
        # One try at least, however long the open requests took.
        end = time.monotonic() + max(self._patience, 1.0)
        while True:
            answer = self.ask("POST", "/reset_prefix_cache", timeout_s=max(1.0, end - time.monotonic()))
            # Versions of vLLM that do not say so have reset it.
            if not (isinstance(answer, dict) and answer.get("success") is False):
                return
            if time.monotonic() + RETRY_S > end:
                break
            time.sleep(RETRY_S)
        raise RolloutError(
            f"the engine at {self.url} refuses to drop the prompts that it cached with its previous weights"
            ' (/reset_prefix_cache answers "success": false as long as requests hold them);'
            f" waited {self.timeout_s:.0f} s (rollout.timeout_s)"
        )

    def _resume(self, timeout_s: float) -> None:
        if self._paused:
            self.ask("POST", "/resume", timeout_s=timeout_s)
            self._paused = False

    def is_paused(self) -> bool:
        """Whether somebody has paused the server; it answers no request then."""
        try:
            return (self.ask("GET", "/is_paused") or {}).get("is_paused") is True
        except NoSuchRoute:
            return False

    # --- what it holds and computes
    def version(self) -> str:
        return str(self.ask("GET", "/weight_info")["weight_version"])

    def served(self) -> dict[str, Any]:
        """The model that the server has: {"id", "root": its folder, "max_model_len"}."""
        found = self.ask("GET", "/v1/models")["data"][0]
        self.model = found["id"]
        return found

    def complete(self, **parameters: Any) -> dict[str, Any]:
        if not self.model:
            self.served()
        return self.ask("POST", "/v1/completions", {"model": self.model, **parameters})["choices"][0]

    def logprobs(self, rows: Sequence[Sequence[int]]) -> list[list[float]]:
        """log p of every token of a row but its first."""
        found = []
        for row in rows:
            choice = self.complete(prompt=list(row), max_tokens=1, temperature=0, prompt_logprobs=0)
            found.append([entry[str(t)]["logprob"] for entry, t in zip(choice["prompt_logprobs"][1:], row[1:])])
        return found

    def close(self) -> None:
        self._client.close()
