"""The engine child: `python -m comlrl_ds.rollout.engine_server`, started by `EngineProcess`. The only process with vLLM.

It reads its settings as one JSON line from stdin, listens, loads the engine, and answers one message at a time: of the main
rank, which has it generate, and of the actors' leads, which give it weights.
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
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, Listener, wait
from typing import Any

from comlrl_ds.cluster.channel import hear, tell


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


# How long a child tries to drop cached prompts: nobody but its trainer has requests there, and they are ended by then.
RESET_S = 5.0


class VLLMServer:
    """vLLM behind a few calls with plain arguments."""

    def __init__(self, settings: dict[str, Any]) -> None:
        from vllm import LLM

        self.llm = LLM(**settings["llm"])
        if settings["llm"]["weight_transfer_config"]["backend"] == "host":
            self.llm.init_weight_transfer_engine({"init_info": {}})
        self.engine = self.llm.llm_engine
        self.adapter: Any = None  # vLLM's request of the adapter to compute with
        self.probe_rows: list[list[int]] = settings["probe"]
        self.submissions = 0

    def ready(self, say: Callable[[Any], None]) -> dict[str, Any]:
        return {"pid": os.getpid(), "probe": self.logprobs(say, self.probe_rows) if self.probe_rows else []}

    def generate(self, say: Callable[[Any], None], requests: list[dict[str, Any]], sampling: dict[str, Any]) -> list[list[Any]]:
        """Completions leave as they finish: ("part", [[index, ids, finish reason, log-probs], …]).

        Returns:
            [index, reason] of each request that vLLM refused; the others are answered.
        """
        from vllm import SamplingParams

        self.submissions += 1
        prefix = f"{self.submissions}:"
        refused: list[list[Any]] = []
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
                logprobs=0 if sampling["logprobs"] else None,  # of the sampled token alone
            )
            try:
                self.engine.add_request(
                    f"{prefix}{k}", {"prompt_token_ids": r["prompt"]}, parameters, lora_request=self.adapter
                )
            except Exception as error:  # vLLM validates each request by itself, and one that it refuses costs no other
                refused.append([k, f"{type(error).__name__}: {error}"])
        try:
            while self.engine.has_unfinished_requests():
                outputs = self.engine.step()
                done = [[int(o.request_id.removeprefix(prefix)), *_sampled(o.outputs[0])] for o in outputs if o.finished]
                if done:
                    say(["part", done])
        except BaseException:
            # What is left in the queue must not be answered within the next submission.
            self.engine.abort_request([f"{prefix}{k}" for k in range(len(requests))])
            raise
        return refused

    def logprobs(self, say: Callable[[Any], None], rows: list[list[int]]) -> list[list[float]]:
        from vllm import SamplingParams

        parameters = SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=0, detokenize=False)
        prompts = [{"prompt_token_ids": r} for r in rows]
        outputs = self.llm.generate(prompts, parameters, use_tqdm=False, lora_request=self.adapter)
        return [[d[t].logprob for d, t in zip(o.prompt_logprobs[1:], row[1:])] for o, row in zip(outputs, rows)]

    # The calls of a native weight transfer. A sync is start, any number of updates, finish.
    def init_weight_transfer(self, say: Callable[[Any], None], init_info: dict[str, Any]) -> None:
        self.llm.init_weight_transfer_engine({"init_info": init_info})

    def start_weight_update(self, say: Callable[[Any], None]) -> None:
        self.end_requests()
        self.llm.start_weight_update()

    def end_requests(self) -> None:
        """Ends what an interrupted submission left: nobody reads its answers, and it must not hold cached prompts."""
        if self.engine.has_unfinished_requests():
            self.engine.abort_request(list(self.engine.output_processor.request_states), internal=True)
            self.engine.step()  # which frees what the requests held

    def reset_prefix_cache(self) -> None:
        """Drops the prompts that were computed with the weights before.

        Raises:
            RuntimeError: vLLM goes on refusing to.
        """
        end = time.monotonic() + RESET_S
        while self.llm.reset_prefix_cache() is False:
            if time.monotonic() > end:
                raise RuntimeError(
                    "vLLM refuses to drop the prompts that it cached with its previous weights: reset_prefix_cache() returns"
                    f" False as long as requests hold them; waited {RESET_S:.0f} s"
                )
            time.sleep(0.05)

    def update_weights(self, say: Callable[[Any], None], update_info: dict[str, Any]) -> None:
        self.llm.update_weights({"update_info": update_info})

    def finish_weight_update(self, say: Callable[[Any], None], version: str) -> dict[str, Any]:
        self.llm.finish_weight_update(version)
        self.reset_prefix_cache()
        probe = self.logprobs(say, self.probe_rows) if self.probe_rows else []
        return {"version": self.llm.get_weight_version(), "probe": probe}

    def workers(self, say: Callable[[Any], None]) -> int:
        return self.engine.vllm_config.parallel_config.world_size

    # On a GPU that a trainer shares: memory is given back between collections.
    def sleep(self, say: Callable[[Any], None], level: int) -> None:
        self.llm.sleep(level=level)

    def wake(self, say: Callable[[Any], None], tags: list[str]) -> None:
        self.llm.wake_up(tags=tags)

    def usage(self, say: Callable[[Any], None]) -> dict[str, float]:
        return usage()


class TransformersServer:
    """The same calls by transformers' `generate`, where vLLM is not installed."""

    def __init__(self, settings: dict[str, Any]) -> None:
        import torch

        from comlrl_ds.rollout.transformers_rollout import TransformersRollout

        llm = settings["llm"]
        self.rollout = TransformersRollout(llm["model"], dtype=getattr(torch, llm["dtype"]), device=llm["device"])
        self.probe_rows: list[list[int]] = settings["probe"]
        self.loaded: set[str] = set()
        self.adapter: dict[str, Any] = {}
        self.base = ""

    def ready(self, say: Callable[[Any], None]) -> dict[str, Any]:
        return {"pid": os.getpid(), "probe": self.logprobs(say, self.probe_rows) if self.probe_rows else []}

    def generate(self, say: Callable[[Any], None], requests: list[dict[str, Any]], sampling: dict[str, Any]) -> list[list[Any]]:
        from comlrl_ds.rollout.base import Request, RequestsRefused, Sampling

        listed = [Request("", r["prompt"], r["max_new_tokens"], r["seed"], tuple(r["stop_ids"])) for r in requests]
        self.rollout.submit(listed, Sampling(**sampling))
        try:
            while (done := self.rollout.receive()) is not None:
                say(["part", [[k, list(c.ids), c.finish_reason, list(c.logprobs)] for k, c in done]])
        except RequestsRefused as error:
            return [list(pair) for pair in error.refused]
        return []

    def logprobs(self, say: Callable[[Any], None], rows: list[list[int]]) -> list[list[float]]:
        return self.rollout.prompt_logprobs(rows)

    def start_weight_update(self, say: Callable[[Any], None]) -> None:
        self.loaded, self.adapter = set(), {}

    def update_weights(self, say: Callable[[Any], None], update_info: dict[str, Any]) -> None:
        from comlrl_ds.rollout.chunks import copies, opened, view

        if update_info.get("base"):
            self.base = update_info["base"]
            self.adapter |= copies(update_info, update_info["tensors"])
            return
        with opened(update_info) as buffer:
            self.loaded |= self.rollout.load((name, view(buffer, *rest)) for name, *rest in update_info["tensors"])
            del buffer

    def finish_weight_update(self, say: Callable[[Any], None], version: str) -> dict[str, Any]:
        if self.adapter:
            self.loaded |= self.rollout.load_merged(self.base, self.adapter)
        self.rollout.check_all_loaded(self.loaded)
        return {"version": version, "probe": self.logprobs(say, self.probe_rows) if self.probe_rows else []}

    def usage(self, say: Callable[[Any], None]) -> dict[str, float]:
        return usage()


def _sampled(output: Any) -> list[Any]:
    """[ids, finish reason, log-probs] of one of vLLM's outputs."""
    ids = list(output.token_ids)
    return [ids, output.finish_reason, [d[t].logprob for d, t in zip(output.logprobs or [], ids)]]


def usage() -> dict[str, float]:
    """CPU seconds and peak resident memory (MB) of this process."""
    import resource

    used = resource.getrusage(resource.RUSAGE_SELF)
    return {"cpu_s": used.ru_utime + used.ru_stime, "peak_rss_mb": used.ru_maxrss / 1024}


CALLS = ("ready", "generate", "logprobs", "init_weight_transfer", "workers", "start_weight_update", "update_weights",
         "finish_weight_update", "adapters", "sleep", "wake", "usage")  # fmt: skip
SERVERS = {"vllm": VLLMServer, "transformers": TransformersServer}


def serve() -> None:
    settings = json.loads(sys.stdin.buffer.readline())
    die_with_parent(settings["parent"])
    # Listening before the engine is imported lets the trainer connect at once and see the child die instead of waiting.
    key = bytes.fromhex(settings["key"])
    listeners = [Listener(settings["address"], authkey=key)]
    if settings["far"]:  # ranks on other machines
        listeners.append(Listener(("", 0), authkey=key))
    peers: list[Connection] = []

    def accept(listener: Listener) -> None:
        while True:
            with contextlib.suppress(OSError, EOFError, AuthenticationError):  # a peer that gives up, or has the wrong key
                peers.append(listener.accept())

    for listener in listeners:
        threading.Thread(target=accept, args=(listener,), daemon=True, name="accept").start()
    try:
        server = _server(settings)
    except Exception as error:
        traceback.print_exc()
        _fail_start(peers, error)
        raise
    port = listeners[-1].address[1] if settings["far"] else 0
    while True:
        if not peers:
            time.sleep(0.02)
            continue
        for peer in wait(list(peers), timeout=0.2):
            assert isinstance(peer, Connection)
            try:
                _answer(server, peer, port)
            except (EOFError, OSError):
                peers.remove(peer)


def _server(settings: dict[str, Any]) -> Any:
    if settings["llm"].get("enable_lora"):
        from comlrl_ds.rollout.adapter_server import AdapterServer

        return AdapterServer(settings)
    return SERVERS[settings["backend"]](settings)


def _answer(server: Any, peer: Connection, port: int) -> None:
    name, arguments = hear(peer)
    try:
        if name not in CALLS or not hasattr(server, name):
            raise ValueError(f"no call {name!r}")
        value = getattr(server, name)(lambda message: tell(peer, message), **arguments)
        reply = ["ok", {**value, "port": port} if name == "ready" else value]
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
