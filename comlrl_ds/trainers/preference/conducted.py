"""Methods of trainers in a launch of several ranks."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

Method = TypeVar("Method", bound=Callable[..., Any])


def conducted(method: Method) -> Method:
    """The main rank runs the method, while every other rank that calls it works for the main one until it returns.

    All ranks return the same value. An error on any rank ends all of them. Until the method returns, its trainer is at work.
    """

    @functools.wraps(method)
    def wrapper(self: Any, *args: Any, **kwargs: Any) -> Any:
        def work() -> Any:
            with self.working(method.__name__):
                return method(self, *args, **kwargs)

        return self.cluster.conduct(work)

    return wrapper  # type: ignore[return-value]
