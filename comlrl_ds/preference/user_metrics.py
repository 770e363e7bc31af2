"""Metrics that functions of the user's compute: `eval_aggregator` and `metrics_callback`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from comlrl_ds.config.errors import ConfigError, Problem
from comlrl_ds.config.user_code import UserCodeError, call_user, described, number_in, shortened
from comlrl_ds.preference.collection import SampledItem
from comlrl_ds.runs.metrics import is_ours

MOVED = "user/"


@dataclass
class UserMetrics:
    """What a function returned, as metrics.

    Attributes:
        values: numbers by the whole name of the metric. moved: (name as the function gave it, whole name) where the given one
            is a metric of the trainer's, which keeps it.
    """

    values: dict[str, float] = field(default_factory=dict)
    moved: dict[str, str] = field(default_factory=dict)


def read_metrics(returned: Any, function: Callable[..., Any], *, what: str, where: str, prefix: str = "") -> UserMetrics:
    """The metrics in what a function of the user's returned: a mapping of names to numbers; None is no metric.

    A name that is a metric of the trainer's is not overwritten: the user's value gets "user/" before its own name.

    Args:
        what, where: see `call_user`. prefix: before every name.

    Raises:
        UserCodeError: anything else was returned; names the function, its file, and what it returned.
    """
    if returned is None:
        return UserMetrics()
    who = f"{where}: the {what} {described(function)} returned"
    if not isinstance(returned, Mapping):
        raise UserCodeError(f"{who} {shortened(returned)}; return a mapping of names to numbers, or None")
    numbers: dict[str, float] = {}
    for name, value in returned.items():
        if not isinstance(name, str | int) or not (text := str(name)).strip("/ ") or text.endswith("/"):
            raise UserCodeError(f"{who} the key {name!r}, which is no name of a metric; write a text such as 'accuracy'")
        number = number_in(value)
        if number is None:
            raise UserCodeError(f"{who} {shortened(value)} for {text!r}; return one number for every name")
        if text in numbers:
            raise UserCodeError(f"{who} {text!r} twice, as a number and as a text; return every name once")
        numbers[text] = number
    found = UserMetrics({prefix + name: n for name, n in numbers.items() if not is_ours(prefix + name)})
    for name in numbers:
        if is_ours(prefix + name):
            free = prefix + MOVED + name
            while free in found.values:
                free = prefix + MOVED + free.removeprefix(prefix)
            found.values[free], found.moved[name] = numbers[name], free
    return found


def moved_line(found: UserMetrics, what: str) -> str:
    """Says which names were the trainer's."""
    listed = ", ".join(f"{name!r} is recorded as {whole!r}" for name, whole in found.moved.items())
    return f"note: {what} returned names of the trainer's own metrics, which stay as they are: {listed}"


@dataclass(frozen=True)
class EvaluationUser:
    """The user's `eval_logger` and `eval_aggregator`, which add metrics to an evaluation together."""

    logger: Callable[..., Any] | None = None
    aggregator: Callable[..., Any] | None = None

    @staticmethod
    def read(logger: Any, aggregator: Any) -> EvaluationUser:
        """Checks the two arguments.

        Raises:
            ConfigError: one without the other, or one that cannot be called.
        """
        if (logger is None) != (aggregator is None):
            message = "eval_logger and eval_aggregator go together; give both or none"
            raise ConfigError(Problem("eval_logger", message))
        for name, value in (("eval_logger", logger), ("eval_aggregator", aggregator)):
            check_callable(value, name)
        return EvaluationUser(logger, aggregator)

    def metrics(self, sampled: Sequence[SampledItem]) -> UserMetrics:
        """Metrics under eval/ of what was sampled.

        The logger is called once, with `agent_completions_turns` [agents][samples][turns], and for each sample its task in
        `batch_items` and the task's "prompt" in `prompts`; what it returns is handed to the aggregator with `num_turns=1`.

        Raises:
            UserCodeError: one of them raised an exception, or the aggregator returned no metrics.
        """
        if self.logger is None or self.aggregator is None or not sampled:
            return UserMetrics()
        each = [(s, g) for s in sampled for g in range(len(s.texts[0]))]
        given = {
            "agent_completions_turns": [[[s.texts[i][g]] for s, g in each] for i in range(len(sampled[0].texts))],
            "batch_items": [s.joint.item for s, _ in each],
            "prompts": [s.joint.item.get("prompt", "") for s, _ in each],
        }
        rows = call_user(self.logger, what="eval_logger", where="evaluation", keywords=given)
        what, where = "eval_aggregator", "evaluation"
        returned = call_user(self.aggregator, rows, what=what, where=where, keywords={"num_turns": 1})
        return read_metrics(returned, self.aggregator, what=what, where=where, prefix="eval/")


def check_callable(value: Any, path: str) -> None:
    """Raises ConfigError for what is neither None nor callable."""
    if value is not None and not callable(value):
        raise ConfigError(Problem(path, f"{value!r} is not callable; give a function"))
