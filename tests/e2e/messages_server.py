"""A server on loopback that answers as the Anthropic Messages API does."""

from __future__ import annotations

import json
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

WORDS = ["a tide", "bread", "an ox", "salt", "a lamp", "bees"]


@contextmanager
def messages_server():
    """Gives (URL, requests so far as {"headers", "body"}); `answers` differ from request to request."""
    requests: list[dict] = []

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self):
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            requests.append({"headers": dict(self.headers), "body": body})
            text = WORDS[len(requests) % len(WORDS)]
            blocks = [{"type": "text", "text": text}, {"type": "text", "text": "!"}]
            answer = json.dumps({"content": blocks}).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer)

        def log_message(self, *_):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/v1/messages", requests
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
