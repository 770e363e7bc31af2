"""The oracle: one shared score for a joint response."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from comlrl_ds.config.errors import ConfigError, Problem
from comlrl_ds.config.user_code import UserCodeError, call_user, described, number_in, shortened


class OracleError(RuntimeError):
    """The reward function failed; names the function, its file and the task."""


class OracleResultError(OracleError):
    """The reward function returned anything but one number for one joint response: a mistake in the function."""


@dataclass(frozen=True)
class Score:
    """One joint response's score before and after `reward_processor`. NaN or infinite means *invalid*."""

    raw: float
    value: float

    @property
    def valid(self) -> bool:
        return math.isfinite(self.value) and math.isfinite(self.raw)


INVALID = Score(math.nan, math.nan)
MISSING = Score(math.nan, math.nan)
"""Stands where there was no answer to score: not the oracle's doing, so not counted as invalid."""


class Oracle:
    """Calls the user's reward function with one joint response at a time.

    The function gets n one-element lists, one per agent, in whichever form its signature asks for: n positional
    parameters (or varargs) take the n lists, n+1 take the prompts first, a single one takes a list of the n lists.
    `batch_items=[item]` and `prompts=[…]` are passed to functions that name them or take any keyword. It returns one number,
    or a list, an array or a tensor of one.
    """

    def __init__(
        self, reward_func: Callable[..., Any], num_agents: int, reward_processor: Callable[[float], float] | None = None
    ):
        if not callable(reward_func):
            raise ConfigError(Problem("reward_func", f"{reward_func!r} is not callable"))
        if reward_processor is not None and not callable(reward_processor):
            raise ConfigError(Problem("reward_processor", f"{reward_processor!r} is not callable"))
        self.reward_func, self.reward_processor, self.num_agents = reward_func, reward_processor, num_agents
        self._form, self._keywords = _calling_form(reward_func, num_agents)

    def score(self, item: Mapping[str, Any], index: int, prompts: Sequence[str], completions: Sequence[str]) -> Score:
        """Score of one joint response (texts by agent) to the task at `index`."""
        lists = [[text] for text in completions]
        forms: dict[str, list[Any]] = {"lists": lists, "one": [lists], "prompts": [[prompts[0]], *lists]}
        args = forms[self._form]
        available = {"batch_items": [item], "prompts": [prompts[0]]}
        if self._form == "prompts":
            del available["prompts"]
        keywords = {name: value for name, value in available.items() if name in self._keywords}
        where = f"task {index}"
        try:
            returned = call_user(self.reward_func, *args, what="reward function", where=where, keywords=keywords)
            raw = _one_number(returned, self.reward_func, "reward function", where)
            if self.reward_processor is None:
                return Score(raw, raw)
            returned = call_user(self.reward_processor, raw, what="reward processor", where=where)
            return Score(raw, _one_number(returned, self.reward_processor, "reward processor", where))
        except UserCodeError as error:
            raise OracleError(str(error)) from error.__cause__


def _calling_form(function: Callable[..., Any], n: int) -> tuple[str, set[str]]:
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return "lists", set()
    kinds = inspect.Parameter
    context = ("batch_items", "prompts")
    keywords = {p.name for p in parameters if p.name in context and p.kind is not kinds.VAR_POSITIONAL}
    if any(p.kind is kinds.VAR_KEYWORD for p in parameters):
        keywords = set(context)
    if any(p.kind is kinds.VAR_POSITIONAL for p in parameters):
        return "lists", keywords
    positional = [p for p in parameters if p.kind in (kinds.POSITIONAL_ONLY, kinds.POSITIONAL_OR_KEYWORD)]
    must = [p for p in positional if p.default is kinds.empty and p.name != "batch_items"]
    if len(must) == n + 1 and must[0].name == "prompts":
        return "prompts", keywords - {"prompts"}
    plain = [p for p in positional if p.name not in context or p.kind is kinds.POSITIONAL_ONLY]
    required = [p for p in plain if p.default is kinds.empty]
    if any(len(group) == n for group in (plain, required)):
        return "lists", keywords
    if len(plain) == n + 1 or len(required) == n + 1:
        return "prompts", keywords - {"prompts"}
    if len(required or plain) == 1 and n > 1:
        return "one", keywords
    raise ConfigError(
        Problem(
            "reward_func",
            f"takes {len(plain)} positional arguments; for {n} agents write {n} (one list of texts per agent),"
            f" {n + 1} (prompts first) or one (a list of the {n} lists)",
        )
    )


def _one_number(returned: Any, function: Any, what: str, where: str) -> float:
    """The one number in what a function returned for one joint response. NaN and infinities are numbers.

    Raises:
        OracleResultError: it is none, or there are more.
    """
    number = number_in(returned)
    if number is None:
        raise OracleResultError(
            f"{where}: the {what} {described(function)} returned {shortened(returned)} for one joint response;"
            " return one number, or a list of one"
        )
    return number
