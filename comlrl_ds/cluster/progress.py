"""A counter that moves while this process gets on with its work; the watch takes one that stands still for a hang."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


class _Progress:
    """`count` only grows; `doing` names the work in hand, None while waiting for some."""

    def __init__(self) -> None:
        self.count = 0
        self.doing: str | None = None


PROGRESS = _Progress()


def tick() -> None:
    """Something got done."""
    PROGRESS.count += 1


@contextmanager
def at_work(what: str) -> Iterator[None]:
    """Names the work in hand for the length of a block."""
    before, PROGRESS.doing = PROGRESS.doing, what
    tick()
    try:
        yield
    finally:
        PROGRESS.doing = before
        tick()
