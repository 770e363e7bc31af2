"""Engines that the user started: vLLM's own HTTP server, for generation and for weight sync.

    VLLM_SERVER_DEV_MODE=1 VLLM_PLUGINS=comlrl_ds python -m vllm.entrypoints.openai.api_server --model FOLDER \\
        --generation-config vllm --weight-transfer-config '{"backend": "host"}'

The development mode opens the routes of weight transfer; such a server must not face a network that is not trusted. Weights
are read by the server over TCP from the rank that has them.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from multiprocessing import Pipe
from typing import Any
from urllib.parse import urlsplit

from comlrl_ds.rollout.base import Completion, Request, RequestsRefused, RolloutError, Sampling
from comlrl_ds.rollout.engine_client import EngineClient
from comlrl_ds.rollout.engine_process import EngineAddress
from comlrl_ds.rollout.http_calls import FIRST_VERSION, HTTPCalls


class HTTPRollout(EngineClient):
    """A server of the user's as an engine.

    Args:
        url: of the server. sources: the agents' model folders; it was started with one of them.
        start_timeout_s: how long it may take until it answers. timeout_s: longest answer.
        probe: rows for verifying syncs; empty does not verify. requests: most requests at a time.
    """

    def __init__(
        self, url: str, sources: Sequence[str], *, index: int, start_timeout_s: float = 600, timeout_s: float = 600,
        probe: Sequence[Sequence[int]] = (), requests: int = 256,
    ) -> None:  # fmt: skip
        host = urlsplit(url).hostname or ""
        address = EngineAddress("", 0, url, host, "another machine", sources[0], index, "host", url)
        super().__init__(address, name=f"the engine at {url}", verify=bool(probe))
        self._http = HTTPCalls(url, timeout_s, probe)
        self.probe_rows = probe
        self._start_timeout_s, self._sources = start_timeout_s, list(sources)
        self._threads = ThreadPoolExecutor(requests, "http")
        self.connection, self._done = Pipe(duplex=False)
        self._lock = threading.Lock()
        self._left = 0
        self._longest = 0
        self._refused: list[tuple[int, str]] = []

    @property
    def calls(self) -> HTTPCalls:
        return self._http

    def wait_ready(self) -> None:
        """Waits until the server answers, and takes note of what it holds.

        Raises:
            RolloutError: it does not answer in time, is paused all the time, was started without what a sync needs, or serves
                another model.
        """
        end = time.monotonic() + self._start_timeout_s
        while True:
            try:
                served = self._http.served()
                if self._http.is_paused():  # another run may be in the middle of a sync
                    raise RolloutError(f"the engine at {self._http.url} is paused; send POST /resume to it, or restart it")
                break
            except RolloutError:
                if time.monotonic() > end:
                    raise
                time.sleep(0.5)
        root, self._longest = served["root"], int(served.get("max_model_len") or 0)
        known = {os.path.realpath(s): s for s in self._sources}
        if os.path.realpath(root) not in known:
            agents = " or ".join(dict.fromkeys(map(repr, self._sources)))
            raise RolloutError(f"the engine at {self._http.url} serves {root!r}; start it with {agents}")
        self.source = self.held = known[os.path.realpath(root)]
        self.address = replace(self.address, source=self.source)
        self._http.init_weight_transfer_engine({})
        version = self._http.version()
        # A server that was synced before has other weights than its folder.
        self.held = self.source if version == FIRST_VERSION else f"{version} of an earlier run"
        if self.verify:
            self.probe = self._http.logprobs(self._http.probe_rows)

    def submit(self, requests: Sequence[Request], sampling: Sampling) -> None:
        self._left = len(requests)
        for k, request in enumerate(requests):
            self._threads.submit(self._one, k, request, sampling)

    def _one(self, k: int, r: Request, sampling: Sampling) -> None:
        message: Any
        try:
            if self._longest and len(r.prompt) + r.max_new_tokens > self._longest:
                raise RolloutError(
                    f"the engine at {self._http.url} takes {self._longest} tokens; start it with a larger --max-model-len,"
                    f" or write rollout.max_model_len: {self._longest}"
                )
            choice = self._http.complete(
                prompt=list(r.prompt), max_tokens=r.max_new_tokens, seed=r.seed, stop_token_ids=list(r.stop_ids),
                ignore_eos=True, temperature=sampling.temperature, top_p=sampling.top_p, top_k=sampling.top_k or 0,
                min_tokens=min(sampling.min_new_tokens, r.max_new_tokens), return_token_ids=True, detokenize=False,
                logprobs=0 if sampling.logprobs else None,
            )  # fmt: skip
            scores = choice["logprobs"]["token_logprobs"] if sampling.logprobs else []
            message = [k, choice["token_ids"], choice["finish_reason"], scores]
        except (RolloutError, KeyError, TypeError) as error:
            message = [k, f"{type(error).__name__}: {error}" if not isinstance(error, RolloutError) else str(error)]
        with self._lock:
            self._done.send(message)

    def receive(self) -> list[tuple[int, Completion]] | None:
        assert self.connection
        message = self.connection.recv()
        if message is None:
            if refused := self._refused:
                self._refused = []
                raise RequestsRefused(refused)
            return None
        self._left -= 1
        if not self._left:
            # What `wait` shall see once more: that this submission is over.
            with self._lock:
                self._done.send(None)
        if len(message) == 2:
            self._refused.append((message[0], message[1]))
            return []
        k, ids, reason, scores = message
        return [(k, Completion(tuple(ids), reason, self.held, tuple(scores)))]

    def prompt_logprobs(self, rows: Sequence[Sequence[int]]) -> list[list[float]]:
        return self._http.logprobs(rows)

    def shutdown(self) -> None:
        """Leaves the server running: it is the user's."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        self._http.close()
        self.close_sender()
