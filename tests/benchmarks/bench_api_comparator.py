"""P6: a comparator behind HTTP that takes 0.3 s per answer; ours beside the peer, which asks for one answer after another.

Beside the peer itself, whose environment run.py makes in build/peer:

    bench_api_comparator.py --peer-python build/peer/bin/python --peer-parts …/run_parts.py --model models/smollm2-135m

Without it, beside a stand-in that asks as the peer does: serially, with a new connection for every request.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from tempfile import TemporaryDirectory

import workloads as shared

from comlrl_ds.config.api_settings import APISettings
from comlrl_ds.preference.api_comparator import APIAnswer, APIComparator
from comlrl_ds.preference.api_formats import APIRequest, format_of
from comlrl_ds.rollout.base import Sampling

# 4 × 2 agents × 4 = 32 answers; the format has no way to ask for several at once, so as many requests.
TASKS, CANDIDATES, NEW_TOKENS, FORMAT = 4, 4, 64, "anthropic"
REQUESTS = TASKS * shared.AGENTS * CANDIDATES
SAMPLING = Sampling(temperature=0.8, top_p=0.95)
LIMIT_SECONDS = 600


class SlowServer(ThreadingHTTPServer):
    """Answers each request after `latency` seconds, as many at a time as come, on a free port of this machine."""

    request_queue_size = 128  # all connections may come at once; one that finds the queue full is late by a second
    daemon_threads = True

    def __init__(self, latency: float) -> None:
        super().__init__(("127.0.0.1", 0), SlowHandler)
        self.latency, self.answered, self.lock = latency, 0, threading.Lock()
        self.url = f"http://127.0.0.1:{self.server_port}/v1"


class SlowHandler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    server: SlowServer

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        time.sleep(self.server.latency)
        with self.server.lock:
            self.server.answered += 1
        body = json.dumps({"content": [{"type": "text", "text": "A short sentence about it."}]}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        pass


@contextmanager
def slow_server(latency: float) -> Iterator[SlowServer]:
    """A server that has stopped when the block ends; the block must have asked for all answers, each once."""
    with SlowServer(latency) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()
        check_requests(server.answered)


def check_requests(count: int) -> None:
    if count != REQUESTS:
        sys.exit(f"{count} requests were made instead of {REQUESTS}")


def settings(url: str) -> APISettings:
    return APISettings(url=url, format=FORMAT, model="m")


def requests() -> list[APIRequest]:
    return [
        APIRequest(k, item, agent, formatter(item), CANDIDATES, NEW_TOKENS)
        for k, item in enumerate(shared.tasks(TASKS))
        for agent, formatter in enumerate(shared.FORMATTERS)
    ]


def ours(latency: float) -> float:
    """Seconds from making the comparator to having closed it, so connecting counts."""
    with slow_server(latency) as server:
        started = time.perf_counter()
        with APIComparator(settings(server.url), SAMPLING) as comparator:
            answers = [answer for _, answer in comparator.ask(requests())]
        seconds = time.perf_counter() - started
    texts = [text for answer in answers if isinstance(answer, APIAnswer) for text in answer.texts if text]
    if len(texts) != REQUESTS or comparator.counters.retries:
        sys.exit(f"{len(texts)} answers instead of {REQUESTS}, {comparator.counters.retries} retries")
    return seconds


def stand_in(latency: float) -> float:
    """Seconds for the same requests one by one; urllib closes the connection after each."""
    with slow_server(latency) as server:
        started = time.perf_counter()
        api_format = format_of(settings(server.url), SAMPLING)
        for request in requests():
            for _ in range(request.candidates):
                url, headers, body = api_format.build(request, 1)
                with urllib.request.urlopen(urllib.request.Request(url, body, headers), timeout=LIMIT_SECONDS) as answer:
                    assert api_format.read(json.load(answer))
        return time.perf_counter() - started


def peer(options: argparse.Namespace) -> float:
    """Seconds that the peer's own script reports for asking; making its trainer is not counted."""
    with TemporaryDirectory() as folder:
        environment = os.environ | {
            "PEER_MODEL": str(options.model.resolve()), "PEER_OUT": folder, "PEER_THREADS": "2", "OMP_NUM_THREADS": "2",
            "CUDA_VISIBLE_DEVICES": "", "WANDB_MODE": "disabled", "HF_HUB_OFFLINE": "1", "PYTHONDONTWRITEBYTECODE": "1",
        }  # fmt: skip
        work = {"tasks": TASKS, "cands": CANDIDATES, "new": NEW_TOKENS, "format": FORMAT, "latency": options.latency}
        flags = [part for name, value in work.items() for part in (f"--{name}", str(value))]
        # Its script writes into the working directory. `absolute`: an environment's interpreter is a link.
        command = [options.peer_python.absolute(), options.peer_parts.resolve(), "--part", "api", *flags]
        done = subprocess.run(
            command,
            cwd=folder,
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=LIMIT_SECONDS,
        )
    lines = [line for line in done.stdout.splitlines() if line.startswith("REPORT ")]
    if done.returncode or not lines:
        sys.exit(f"the peer ended with exit code {done.returncode}\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}")
    report = json.loads(lines[-1].removeprefix("REPORT "))
    check_requests(report["counts"].get("api", 0))
    # Rounded to 0.01 s by its script.
    return report["phases_s"]["api comparator"]


def has_peer(python: Path) -> bool:
    code = "import importlib.util, sys; sys.exit(importlib.util.find_spec('comlrl') is None)"
    return subprocess.run([python, "-c", code]).returncode == 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peer-python", type=Path, help="interpreter of an environment that has the peer")
    parser.add_argument("--peer-parts", type=Path, help="the script run_parts.py that times the peer's phases")
    parser.add_argument("--model", type=Path, help="folder of any Hugging Face model; the peer loads it, P6 does not use it")
    parser.add_argument("--latency", type=float, default=0.3, help="seconds that an answer takes")
    parser.add_argument("--repeat", type=int, default=1, help="measurements of each, in turns; the medians count")
    parser.add_argument("--least", type=float, default=10.0, help="smaller ratios end with exit code 1")
    options = parser.parse_args()
    for name in ("http_proxy", "https_proxy", "all_proxy"):
        os.environ.pop(name, None)
        os.environ.pop(name.upper(), None)

    other = "stand-in for the peer (serial urllib, a new connection each)"
    is_peer = options.peer_python is not None and has_peer(options.peer_python)
    if is_peer:
        if options.peer_parts is None or options.model is None:
            parser.error("--peer-python needs --peer-parts and --model")
        other = "peer (its own run_parts.py --part api)"
    elif options.peer_python is not None:
        print(f"{options.peer_python} has no package comlrl: the peer is not measured")

    concurrency = settings("http://127.0.0.1").concurrency
    print(
        f"P6: {REQUESTS} requests of {options.latency:g} s, format {FORMAT}; ours asks for {concurrency} at a time", flush=True
    )
    ours_s, other_s = [], []
    for turn in range(options.repeat):
        ours_s.append(ours(options.latency))
        other_s.append(peer(options) if is_peer else stand_in(options.latency))
        print(f"{turn + 1}/{options.repeat} ours {ours_s[-1]:.2f} s, {other} {other_s[-1]:.2f} s", flush=True)
    a, b = statistics.median(ours_s), statistics.median(other_s)
    print(f"medians: ours {a:.2f} s : {other} {b:.2f} s = {b / a:.1f} (at least {options.least:g} wanted)")
    print(json.dumps({"workload": "p6", "peer": is_peer, "ours_s": ours_s, "other_s": other_s, "ratio": b / a}))
    sys.exit(b / a < options.least)


if __name__ == "__main__":
    main()
