"""The engine child: `python -m comlrl_ds.rollout.vllm_server`, started by `VLLMRollout`. The only process with vLLM.

It reads its settings as one JSON line from stdin, listens, loads vLLM, and answers one peer at a time.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, Listener, wait
from typing import Any

from comlrl_ds.rollout.wire import hear, tell


def die_with_parent(parent: int) -> None:
    """No engine outlives its trainer, however that dies: by the kernel's signal, and by end-of-file on stdin."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    if os.getppid() != parent:
        os._exit(1)  # it died before the signal was set

    def watch() -> None:
        os.read(0, 1)  # unbuffered: a buffered read would be fatal when the interpreter exits
        os.killpg(0, signal.SIGKILL)  # the child leads a session of its own: this reaps vLLM's workers too

    threading.Thread(target=watch, daemon=True, name="parent watch").start()


class Server:
    """vLLM behind a few calls with plain arguments."""

    def __init__(self, settings: dict[str, Any]) -> None:
        from vllm import LLM

        self.llm = LLM(**settings["llm"])
        self.engine = self.llm.llm_engine
        self.probe_rows: list[list[int]] = settings["probe"]
        self.submissions = 0

    def ready(self, say: Callable[[Any], None]) -> dict[str, Any]:
        return {"pid": os.getpid(), "probe": self.logprobs(say, self.probe_rows) if self.probe_rows else []}

    def generate(self, say: Callable[[Any], None], requests: list[dict[str, Any]], sampling: dict[str, Any]) -> int:
        """Completions leave as they finish: ("part", [[index, ids, finish reason], …])."""
        from vllm import SamplingParams

        self.submissions += 1
        prefix = f"{self.submissions}:"
        for k, r in enumerate(requests):
            parameters = SamplingParams(
                max_tokens=r["max_new_tokens"],
                seed=r["seed"],
                stop_token_ids=r["stop_ids"],
                ignore_eos=True,  # what ends a completion is said in stop_ids, for every tokenizer alike
                detokenize=False,
                temperature=sampling["temperature"],
                top_p=sampling["top_p"],
                top_k=sampling["top_k"] or 0,
                min_tokens=min(sampling["min_new_tokens"], r["max_new_tokens"]),
            )
            self.engine.add_request(f"{prefix}{k}", {"prompt_token_ids": r["prompt"]}, parameters)
        while self.engine.has_unfinished_requests():
            done = [
                [int(o.request_id.removeprefix(prefix)), list(o.outputs[0].token_ids), o.outputs[0].finish_reason]
                for o in self.engine.step()
                if o.finished
            ]
            if done:
                say(["part", done])
        return len(requests)

    def logprobs(self, say: Callable[[Any], None], rows: list[list[int]]) -> list[list[float]]:
        from vllm import SamplingParams

        parameters = SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=0, detokenize=False)
        outputs = self.llm.generate([{"prompt_token_ids": r} for r in rows], parameters, use_tqdm=False)
        return [[d[t].logprob for d, t in zip(o.prompt_logprobs[1:], row[1:])] for o, row in zip(outputs, rows)]

    # The four calls of a native weight transfer. A sync is start, any number of updates, finish.
    def start_weight_update(self, say: Callable[[Any], None]) -> None:
        self.llm.start_weight_update()

    def update_weights(self, say: Callable[[Any], None], update_info: dict[str, Any]) -> None:
        self.llm.update_weights({"update_info": update_info})

    def finish_weight_update(self, say: Callable[[Any], None], version: str) -> dict[str, Any]:
        self.llm.finish_weight_update(version)
        self.llm.reset_prefix_cache()  # cached prompts were computed with the old weights
        probe = self.logprobs(say, self.probe_rows) if self.probe_rows else []
        return {"version": self.llm.get_weight_version(), "probe": probe}

    def usage(self, say: Callable[[Any], None]) -> dict[str, float]:
        import resource

        used = resource.getrusage(resource.RUSAGE_SELF)
        return {"cpu_s": used.ru_utime + used.ru_stime, "peak_rss_mb": used.ru_maxrss / 1024}


CALLS = ("ready", "generate", "logprobs", "start_weight_update", "update_weights", "finish_weight_update", "usage")


def serve() -> None:
    settings = json.loads(sys.stdin.buffer.readline())
    die_with_parent(settings["parent"])
    # Listening before vLLM is imported lets the trainer connect at once and see the child die instead of waiting.
    listener = Listener(settings["address"], authkey=bytes.fromhex(settings["key"]))
    peers: list[Connection] = []

    def accept() -> None:
        while True:
            with contextlib.suppress(OSError, EOFError):  # a peer that gives up, or has the wrong key
                peers.append(listener.accept())

    threading.Thread(target=accept, daemon=True, name="accept").start()
    try:
        server = Server(settings)
        server.llm.init_weight_transfer_engine({"init_info": {}})
    except Exception as error:
        traceback.print_exc()
        _fail_start(peers, error)
        raise
    while True:
        if not peers:
            time.sleep(0.02)
            continue
        for peer in wait(list(peers), timeout=0.2):
            assert isinstance(peer, Connection)
            try:
                _answer(server, peer)
            except (EOFError, OSError):
                peers.remove(peer)


def _answer(server: Server, peer: Connection) -> None:
    name, arguments = hear(peer)
    try:
        if name not in CALLS:
            raise ValueError(f"no call {name!r}")
        reply = ["ok", getattr(server, name)(lambda message: tell(peer, message), **arguments)]
    except (EOFError, BrokenPipeError, ConnectionError):
        raise
    except Exception as error:  # one bad request must not end the engine; the trainer decides
        traceback.print_exc()
        reply = ["error", f"{type(error).__name__}: {error}"]
    tell(peer, reply)


def _fail_start(peers: list[Connection], error: Exception) -> None:
    for peer in peers:
        with contextlib.suppress(OSError):
            tell(peer, ["error", f"start failed: {type(error).__name__}: {error}"])


if __name__ == "__main__":
    serve()
