"""Methods of trainers in a launch of several ranks."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

Method = TypeVar("Method", bound=Callable[..., Any])


def conducted(method: Method) -> Method:
    """The main rank runs the method, while every other rank that calls it works for the main one until it returns.

    All ranks return the same value. An error on any rank ends all of them.
    """

    @functools.wraps(method)
    def wrapper(self: Any, *args: Any, **kwargs: Any) -> Any:
        return self.cluster.conduct(lambda: method(self, *args, **kwargs))

    return wrapper  # type: ignore[return-value]
