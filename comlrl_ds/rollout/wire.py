"""Messages between the trainer and an engine child: JSON, so that only plain types can travel.

Pickle would quietly pass a stray tensor by file descriptor, and fail in the child, far from the cause.
"""

from __future__ import annotations

import json
from multiprocessing.connection import Connection
from typing import Any


def tell(connection: Connection, message: Any) -> None:
    connection.send_bytes(json.dumps(message, separators=(",", ":")).encode())


def hear(connection: Connection) -> Any:
    return json.loads(connection.recv_bytes())
