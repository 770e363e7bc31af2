"""The trainer's side of an engine child: start it, talk to it, give it weights."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Client
from typing import Any

from comlrl_ds.rollout.base import Completion, PolicyWeights, Request, RolloutEngine, RolloutError, Sampling, SyncReport
from comlrl_ds.rollout.host_sender import HostSender
from comlrl_ds.rollout.wire import hear, tell


def probe_rows(vocabulary: int) -> list[list[int]]:
    """Token rows spread over the vocabulary, whose log-probs show whether an engine's weights changed."""
    return [[(7 + 31 * k + 1013 * row) * (vocabulary // 61 + 1) % vocabulary for k in range(24)] for row in range(2)]


def engine_settings(
    source: str,
    *,
    device: str,
    dtype: str,
    max_model_len: int,
    max_num_seqs: int,
    kv_cache_bytes: int | None,
    gpu_memory_utilization: float,
) -> dict[str, Any]:
    """Arguments of `vllm.LLM` for an engine on this kind of device."""
    settings: dict[str, Any] = {
        "model": source, "dtype": dtype, "seed": 0, "skip_tokenizer_init": True, "generation_config": "vllm",
        "max_model_len": max_model_len, "max_num_seqs": max_num_seqs, "weight_transfer_config": {"backend": "host"},
        "disable_log_stats": True,
    }  # fmt: skip
    if device == "cpu":
        # Eager: compiling takes minutes. Blocks of 32: candidates share prompts shorter than the default block of 128.
        # No chunked prefill: a seeded request that is prefilled in parts crashes the CPU sampler.
        settings |= {
            "enforce_eager": True, "block_size": 32, "enable_chunked_prefill": False,
            "max_num_batched_tokens": max(max_model_len, 8192), "kv_cache_memory_bytes": kv_cache_bytes or 1 << 30,
        }  # fmt: skip
    else:
        settings["gpu_memory_utilization"] = gpu_memory_utilization
    return settings


class VLLMRollout(RolloutEngine):
    """One vLLM engine in a child process of this one.

    The constructor returns at once: the child's start-up overlaps with whatever the trainer does until `wait_ready`.
    Start engines from the main thread: the kernel's parent-death signal is bound to the thread that forks.

    Args:
        settings: arguments of `vllm.LLM`, from `engine_settings`.
        environment: the child's whole environment.
        probe: rows for verifying syncs; empty does not verify.
        start_timeout_s: longest start. timeout_s: longest silence while it works.
        log: open file for what the child prints; None is this process's own output.
    """

    def __init__(
        self, settings: Mapping[str, Any], environment: Mapping[str, str], *, probe: Sequence[Sequence[int]] = (),
        start_timeout_s: float = 600, timeout_s: float = 600, log: Any = None,
    ) -> None:  # fmt: skip
        self.source = self.held = str(settings["model"])
        self._start_timeout_s, self._timeout_s = start_timeout_s, timeout_s
        self._log = getattr(log, "name", None)
        # An abstract address leaves no file behind; the key travels through the pipe, not through argv or environment.
        self._address, self._key = f"\0comlrl-{os.getpid()}-{secrets.token_hex(6)}", secrets.token_hex(16)
        self.process = subprocess.Popen(
            [sys.executable, "-W", "ignore", "-m", "comlrl_ds.rollout.vllm_server"],
            env=dict(environment), stdin=subprocess.PIPE, stdout=log, stderr=log, start_new_session=True,
        )  # fmt: skip
        message = {
            "parent": os.getpid(), "address": self._address, "key": self._key, "llm": dict(settings),
            "probe": [list(row) for row in probe],
        }  # fmt: skip
        assert self.process.stdin
        with contextlib.suppress(BrokenPipeError):  # a child that is dead already is reported by wait_ready
            self.process.stdin.write(json.dumps(message).encode() + b"\n")
            self.process.stdin.flush()
        self._sender: HostSender | None = None
        self._probe: list[list[float]] = []

    def wait_ready(self) -> None:
        """Blocks until the engine answers.

        Raises:
            RolloutError: it died, or took longer than `start_timeout_s`.
        """
        end = time.monotonic() + self._start_timeout_s
        while self.connection is None:
            try:
                self.connection = Client(self._address, authkey=bytes.fromhex(self._key))
            except (FileNotFoundError, ConnectionRefusedError):
                if self.process.poll() is not None:
                    raise RolloutError(f"the engine for {self.source} {self._how_it_ended()}, before it was ready") from None
                if time.monotonic() > end:
                    raise RolloutError(
                        f"the engine for {self.source} does not listen after {self._start_timeout_s:.0f} s"
                    ) from None
                time.sleep(0.05)
        self._probe = self._call("ready", timeout=max(1.0, end - time.monotonic()))["probe"]

    def submit(self, requests: Sequence[Request], sampling: Sampling) -> None:
        wired = [
            {"prompt": r.prompt, "max_new_tokens": r.max_new_tokens, "seed": r.seed, "stop_ids": r.stop_ids} for r in requests
        ]
        self._send("generate", {"requests": wired, "sampling": sampling.as_dict()})

    def receive(self) -> list[tuple[int, Completion]] | None:
        kind, value = self._reply(self._timeout_s)
        if kind != "part":
            return None
        return [(k, Completion(tuple(ids), reason, self.held)) for k, ids, reason in value]

    def sync_weights(self, policy: PolicyWeights) -> SyncReport:
        self._sender = self._sender or HostSender(self, self.source)
        before = self._probe
        report, self._probe = self._sender.send(policy)
        # Log-probs of an engine for a fixed batch are exactly repeatable, so new weights must change some of them.
        # A change that leaves most tensors as they were may be too small to show.
        if before and before == self._probe and (changed := self._sender.changed_share()) > 0.5:
            raise RolloutError(
                f"weight sync of {policy.name}: {changed:.0%} of the tensors changed, but the engine answers as before"
            )
        self.held = policy.key
        return report

    def prompt_logprobs(self, rows: Sequence[Sequence[int]]) -> list[list[float]]:
        return self._call("logprobs", rows=[list(r) for r in rows])

    def usage(self) -> dict[str, float]:
        """CPU seconds and peak resident memory (MB) of the engine's process."""
        return self._call("usage")

    # The client's half of vLLM's weight transfer; HostSender drives it.
    def start_weight_update(self) -> None:
        self._call("start_weight_update")

    def update_weights(self, update_info: dict[str, Any]) -> None:
        self._call("update_weights", update_info=update_info)

    def finish_weight_update(self, version: str) -> dict[str, Any]:
        return self._call("finish_weight_update", version=version)

    def shutdown(self) -> None:
        if self.connection is not None:
            self.connection.close()
            self.connection = None
        if self.process.stdin and not self.process.stdin.closed:
            with contextlib.suppress(BrokenPipeError):
                self.process.stdin.close()  # its watcher ends it
        try:
            self.process.wait(10)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        if self._sender:
            self._sender.close()

    def _call(self, name: str, timeout: float | None = None, **arguments: Any) -> Any:
        self._send(name, arguments)
        return self._reply(timeout or self._timeout_s)[1]

    def _send(self, name: str, arguments: dict[str, Any]) -> None:
        if self.connection is None:
            raise RolloutError("the engine is not running")
        try:
            tell(self.connection, [name, arguments])
        except (BrokenPipeError, ConnectionError):
            raise RolloutError(f"the engine for {self.source} {self._how_it_ended()}") from None

    def _reply(self, timeout: float) -> tuple[str, Any]:
        assert self.connection
        if not self.connection.poll(timeout):
            raise RolloutError(f"the engine for {self.source} has not answered for {timeout:.0f} s (rollout.timeout_s)")
        try:
            kind, value = hear(self.connection)
        except (EOFError, ConnectionError):
            raise RolloutError(f"the engine for {self.source} {self._how_it_ended()}") from None
        if kind == "error":
            raise RolloutError(f"the engine for {self.source}: {value}")
        return kind, value

    def _how_it_ended(self) -> str:
        try:
            code = self.process.wait(2)
        except subprocess.TimeoutExpired:
            return "closed its connection"
        how = f"was ended by signal {-code}" if code < 0 else f"ended with exit code {code}"
        return how + (f" (its output: {self._log})" if self._log else "")
