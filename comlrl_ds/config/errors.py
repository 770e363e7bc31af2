"""One error for everything that a user can get wrong before a run starts."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

T = TypeVar("T")


@dataclass(frozen=True)
class Problem:
    """What is wrong (`message`, with what to write instead) and where the user wrote it (`path`)."""

    path: str
    message: str

    def __str__(self) -> str:
        return f"{self.path}: {self.message}" if self.path else self.message


class ConfigError(ValueError):
    """One or more problems, a line each."""

    def __init__(self, problems: Iterable[Problem] | Problem) -> None:
        self.problems = [problems] if isinstance(problems, Problem) else list(problems)
        super().__init__("\n".join(map(str, self.problems)))

    def under(self, prefix: str) -> ConfigError:
        """The same problems with `prefix` before every path."""
        return ConfigError(Problem(".".join(filter(None, (prefix, p.path))), p.message) for p in self.problems)


class Findings:
    """Gathers the problems of several checks, so that one look shows them all."""

    def __init__(self) -> None:
        self.problems: list[Problem] = []

    def of(self, check: Callable[[], T]) -> T | None:
        """The check's result; None where it found problems, which are kept."""
        try:
            return check()
        except ConfigError as error:
            self.problems += error.problems
            return None

    def under(self, prefix: str, check: Callable[[], T]) -> T | None:
        """The same, with `prefix` before the paths of its problems."""
        try:
            return check()
        except ConfigError as error:
            self.problems += error.under(prefix).problems
            return None

    def add(self, path: str, message: str) -> None:
        self.problems.append(Problem(path, message))

    def raise_any(self) -> None:
        """Raises ConfigError if anything was found."""
        if self.problems:
            raise ConfigError(self.problems)


def nearest(name: str, valid: Sequence[str]) -> str:
    """'; did you mean …?' for a near miss, else the valid names."""
    match = difflib.get_close_matches(name, valid, n=1, cutoff=0.6)
    return f"; did you mean {match[0]!r}?" if match else f"; valid: {', '.join(map(str, valid))}"


def problems_of(error: ValidationError, model: type[BaseModel]) -> list[Problem]:
    """pydantic's findings in our words: path, what is wrong, the nearest valid name."""
    found: dict[str, Problem] = {}
    for e in error.errors(include_url=False):
        # pydantic adds the tried type of a union to the place; the user wrote no such thing.
        path = ".".join(str(part) for part in e["loc"] if not _is_type_tag(part))
        inner = e.get("ctx", {}).get("error")
        if isinstance(inner, ConfigError):
            found |= {f"{p.path}\n{p.message}": p for p in inner.under(path).problems}
            continue
        written = _shown(path, e["input"])
        if e["type"] == "extra_forbidden":
            message = f"unknown setting{nearest(str(e['loc'][-1]), _fields_at(model, e['loc'][:-1]))}"
        elif e["type"] == "missing":
            message = "required"
        elif e["type"] in ("value_error", "assertion_error"):
            message = e["msg"].removeprefix("Value error, ").removeprefix("Assertion failed, ")
        elif e["type"] == "literal_error":
            message = f"{written} is not one of {e['ctx']['expected']}"
        else:
            message = f"{e['msg'][0].lower()}{e['msg'][1:]}, got {written}"
        found.setdefault(path if path else message, Problem(path, message))
    return list(found.values())


def _shown(path: str, value: Any) -> str:
    """What the user wrote, as a message may show it: neither a key nor what may hold one."""
    if path == "args" or "comparator_api_" in path or isinstance(value, dict) or "comparator_api_" in str(value):
        return f"a {type(value).__name__}"
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


def _is_type_tag(part: Any) -> bool:
    text = str(part)
    return text in ("int", "str", "float", "bool") or text.startswith(("constrained-", "list[", "dict["))


def _fields_at(model: Any, loc: Sequence[Any]) -> list[str]:
    """Names of the fields at a place inside nested models."""
    for part in loc:
        if isinstance(part, int):
            continue
        field = getattr(model, "model_fields", {}).get(part)
        model = _model_in(field.annotation) if field else None
    return list(getattr(model, "model_fields", {}))


def _model_in(annotation: Any) -> Any:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    for inner in getattr(annotation, "__args__", ()):
        if (found := _model_in(inner)) is not None:
            return found
    return None


class Settings(BaseModel):
    """Base of every settings class: unknown names are refused, errors are `ConfigError`."""

    model_config = ConfigDict(extra="forbid", validate_assignment=True, arbitrary_types_allowed=True)

    def __init__(self, **values: Any) -> None:
        try:
            super().__init__(**values)
        except ValidationError as error:
            raise ConfigError(problems_of(error, type(self))) from None

    def __setattr__(self, name: str, value: Any) -> None:
        try:
            super().__setattr__(name, value)
        except ValidationError as error:
            raise ConfigError(problems_of(error, type(self))) from None
