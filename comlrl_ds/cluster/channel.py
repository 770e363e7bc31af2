"""Framed messages between the processes of a run: over TCP between ranks, and over sockets to engine children.

What the main rank receives is JSON, plain types only: the port is open to whoever reaches it. Only what it sends, over
connections that the others made to it, may carry Python objects.
"""

from __future__ import annotations

import json
import pickle
import socket
import time
from multiprocessing.connection import Connection
from typing import Any

from comlrl_ds.config.errors import ConfigError, Problem


def listen(address: str, port: int) -> socket.socket:
    """A listening socket on the main rank's address, or on every address where that name is no address of this machine.

    Raises:
        ConfigError: the port is taken.
    """
    for host in (address, ""):
        try:
            return socket.create_server((host, port), backlog=1024)
        except OSError as error:
            if error.errno == 98:  # EADDRINUSE
                message = f"{port} is in use on this machine, perhaps by another run; give another --master_port (MASTER_PORT)"
                raise ConfigError(Problem("MASTER_PORT", message)) from None
            if not host:
                raise
    raise AssertionError


def accepted(server: socket.socket) -> Connection:
    """The next connection to a listening socket."""
    peer, _ = server.accept()
    return _framed(peer)


def connected(address: str, port: int, timeout_s: float) -> Connection:
    """A connection, tried again until somebody listens.

    Raises:
        TimeoutError: nobody did in time.
    """
    end = time.monotonic() + timeout_s
    while True:
        try:
            return _framed(socket.create_connection((address, port), timeout=5))
        except OSError as error:
            if time.monotonic() > end:
                raise TimeoutError(f"nobody answers at {address}:{port} after {timeout_s:.0f} s: {error}") from None
            time.sleep(0.1)


def _framed(peer: socket.socket) -> Connection:
    peer.settimeout(None)
    # Without it a message longer than a packet waits for the peer's delayed acknowledgement.
    peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    peer.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    return Connection(peer.detach())


def tell(connection: Connection, message: Any) -> None:
    """Plain types only. Pickle would quietly pass a stray tensor by file descriptor, and fail far from the cause."""
    connection.send_bytes(json.dumps(message, separators=(",", ":")).encode())


def hear(connection: Connection) -> Any:
    return json.loads(connection.recv_bytes())


def packed(message: Any) -> bytes:
    return pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL)


def hear_object(connection: Connection) -> Any:
    """A message of the main rank; never used on what the main rank receives."""
    return pickle.loads(connection.recv_bytes())
