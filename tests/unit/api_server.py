"""A server on loopback that tests script, and how they ask it."""

from __future__ import annotations

import contextlib
import json
import socket
import struct
import threading
import time
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from comlrl_ds.config.api_settings import APISettings
from comlrl_ds.preference.api_comparator import APIComparator
from comlrl_ds.preference.api_formats import APIRequest
from comlrl_ds.rollout.base import Sampling

KEY = "sk-planted/key+0123456789"
SAMPLING = Sampling(temperature=0.5, top_p=0.9, top_k=40)
QUICK = {"backoff": 0.01, "timeout": 60.0, "max_failure_fraction": 1.0}
ITEM = {"id": 7, "prompt": "the tide é", "reference": "moon"}


@dataclass
class Call:
    """A request that reached the server."""

    path: str
    headers: dict[str, str]
    raw: bytes
    time: float
    connection: int

    @property
    def body(self):
        return json.loads(self.raw)


@dataclass
class Reply:
    """What the server does: waits, then answers, or breaks the connection."""

    status: int = 200
    content: object = None
    headers: dict[str, str] = field(default_factory=dict)
    delay: float = 0.0
    reset: bool = False


class Server:
    """`script(call, number of the call)` says how each request is answered."""

    def __init__(self, script, host="127.0.0.1"):
        self.calls: list[Call] = []
        self.script, self.over, lock = script, threading.Event(), threading.Lock()
        outer = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self):
                raw = self.rfile.read(int(self.headers.get("content-length") or 0))
                headers = {name.lower(): value for name, value in self.headers.items()}
                call = Call(self.path, headers, raw, time.monotonic(), self.client_address[1])
                with lock:
                    outer.calls.append(call)
                    number = len(outer.calls)
                reply = outer.script(call, number)
                outer.over.wait(reply.delay)
                if reply.reset:
                    self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                    self.connection.close()
                    self.close_connection = True
                    return
                content = reply.content if isinstance(reply.content, bytes) else json.dumps(reply.content).encode()
                try:
                    self.send_response(reply.status)
                    for name, value in (reply.headers | {"Content-Length": str(len(content))}).items():
                        self.send_header(name, value)
                    self.end_headers()
                    self.wfile.write(content)
                except OSError:  # the client did not wait
                    self.close_connection = True

            do_GET = do_POST

            def log_message(self, *args):
                pass

            def finish(self):
                with contextlib.suppress(OSError, ValueError):
                    super().finish()

        class Quiet(ThreadingHTTPServer):
            daemon_threads = True
            request_queue_size = 64

        self._server = Quiet((host, 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True)
        self._thread.start()
        self.host = f"{host}:{self._server.server_port}"
        self.url = f"http://{self.host}/v1"

    def close(self):
        self.over.set()
        self._server.shutdown()
        self._server.server_close()


@pytest.fixture
def serve(monkeypatch):
    for name in ("http_proxy", "https_proxy", "all_proxy", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
    servers: list[Server] = []

    def start(script, host="127.0.0.1"):
        servers.append(Server(script, host))
        return servers[-1]

    yield start
    for server in servers:
        server.close()


def generic(texts):
    return Reply(content={"completions": texts})


def echo(call, number):
    """Answers of the generic format that name prompt and place."""
    return generic([f"{call.body['prompt']}/{j}" for j in range(call.body["num_return_sequences"])])


def request(index=0, agent=0, candidates=1, prompt=None, item=ITEM, limit=9):
    return APIRequest(index, item, agent, prompt or f"p{index}.{agent}", candidates, limit)


def ask(server, requests, *, sampling=SAMPLING, on_answer=None, known=None, round=0, **settings):
    """(results by request, counters)."""
    with APIComparator(APISettings(url=server.url, **(QUICK | settings)), sampling, on_answer) as comparator:
        results = dict(comparator.ask(requests, round=round, known=known))
    assert sorted(results) == list(range(len(requests)))
    return results, comparator.counters
