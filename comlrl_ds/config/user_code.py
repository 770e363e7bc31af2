"""The one way in which functions of the user's are called, and objects of theirs are described."""

from __future__ import annotations

import functools
import inspect
import math
import numbers
import traceback
from collections.abc import Callable, Mapping
from decimal import Decimal
from pathlib import Path
from typing import Any


class UserCodeError(RuntimeError):
    """A function of the user's raised an exception, or returned what cannot be used; names the function, its file, and where
    it was called.
    """


def described(function: Any) -> str:
    """A callable as its author knows it: its name, and the file and line that define it."""
    inner = function
    while isinstance(inner, functools.partial) or hasattr(inner, "__wrapped__"):
        inner = inner.func if isinstance(inner, functools.partial) else inner.__wrapped__
    code = inner if inspect.isroutine(inner) or inspect.isclass(inner) else type(inner)
    name = getattr(code, "__qualname__", None) or type(inner).__name__
    try:
        file, line = inspect.getsourcefile(code), inspect.getsourcelines(code)[1]
    except (TypeError, OSError):
        return name
    return f"{name} ({Path(file).name if file else '?'}, line {line})"


def call_user(
    function: Callable[..., Any], *args: Any, what: str, where: str, passing: tuple[type[BaseException], ...] = (),
    keywords: Mapping[str, Any] | None = None,
) -> Any:  # fmt: skip
    """What a function of the user's returns.

    Args:
        what: what it is, such as "reward function". where: what it was called for, such as "task 3".
        keywords: further arguments, by name.
        passing: exceptions that mean something to the caller, who gets them as they are.

    Raises:
        UserCodeError: it raised any other exception, or tried to end the program.
    """
    try:
        return function(*args, **(keywords or {}))
    except passing:
        raise
    except (Exception, SystemExit) as error:
        raise UserCodeError(f"{where}: the {what} {described(function)} raised {raised(error)}") from error


def raised(error: BaseException) -> str:
    """An exception in one line: its type, its message, and the line of code where it came from."""
    message = " ".join(str(error).split())
    text = f"{type(error).__name__}: {message}" if message else type(error).__name__
    frames = traceback.extract_tb(error.__traceback__)
    last = next((f for f in reversed(frames) if f.filename != __file__ and not f.filename.startswith("<")), None)
    return f"{text} ({Path(last.filename).name}, line {last.lineno})" if last else text


def shortened(value: Any) -> str:
    """The type and the content of a value, for a message."""
    shown = " ".join(repr(value).split())
    return f"{type(value).__name__} {shown if len(shown) <= 60 else shown[:57] + '...'}"


def number_in(returned: Any) -> float | None:
    """The one number that a value is, or that a list, an array or a tensor holds; None where there is none, or are several.

    NaN and infinities are numbers.
    """
    parts = returned if isinstance(returned, list | tuple) else [returned]
    found = [number for part in parts for number in _elements(part)]
    if len(found) != 1 or not isinstance(found[0], numbers.Real | Decimal):
        return None
    number: Any = found[0]
    try:
        return float(number)
    except OverflowError:  # a whole number beyond every float
        return math.inf if number > 0 else -math.inf


def _elements(value: Any) -> list[Any]:
    """The numbers of a tensor, an array or a scalar of theirs; anything else as it is."""
    if not hasattr(value, "tolist"):
        return [value]
    listed = value.tolist()
    while isinstance(listed, list) and any(isinstance(x, list) for x in listed):
        listed = [x for row in listed for x in (row if isinstance(row, list) else [row])]
    return listed if isinstance(listed, list) else [listed]
