"""One model that answers for every agent: the joint prompt it is given, and its text split into the agents' responses."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

from comlrl_ds.config.errors import ConfigError, Problem
from comlrl_ds.config.user_code import UserCodeError, call_user
from comlrl_ds.preference.prompts import PromptError

_SETTING = "centralized_comparator_adapter"
_METHODS = ("build_prompt", "parse_completion")
# One scan for tags instead of a lazy "opening…closing" pattern, which takes quadratic time on openings never closed.
_TAG = re.compile(r"<(\s*/)?\s*agent_([0-9]+)\s*>", re.IGNORECASE)


class CentralizedComparatorParseError(ValueError):
    """A joint text in which no agent's response can be found."""


@runtime_checkable
class CentralizedComparatorAdapter(Protocol):
    """How one model writes the responses of n agents."""

    def build_prompt(self, item: Mapping[str, Any], agent_prompts: Sequence[str]) -> str:
        """The joint prompt, not blank, of a task.

        Args:
            item: the task.
            agent_prompts: what each agent alone would be given, one per agent.
        """
        ...

    def parse_completion(self, text: str, item: Mapping[str, Any], num_agents: int) -> Sequence[str]:
        """The agents' responses, exactly `num_agents` strings, in what the model wrote.

        Raises:
            CentralizedComparatorParseError: the text holds none of them; it is counted and not compared.
        """
        ...


class TaggedCentralizedComparatorAdapter:
    """The default: every agent's response stands between `<agent_i>` and `</agent_i>`, i from 0."""

    def build_prompt(self, item: Mapping[str, Any], agent_prompts: Sequence[str]) -> str:
        """Instruction, every agent's own prompt under its header, then the form of the answer."""
        n = len(agent_prompts)
        agents = "1 agent" if n == 1 else f"{n} agents"
        headed = [f"Prompt of agent {i}:\n{prompt}" for i, prompt in enumerate(agent_prompts)]
        form = [f"<agent_{i}>\n...\n</agent_{i}>" for i in range(n)]
        return "\n\n".join(
            [
                f"You coordinate a team of {agents}. Write a separate output for each agent.\n"
                "An output answers the prompt of its own agent and nothing else:"
                " never merge outputs, and add no commentary around them.",
                *headed,
                "Reply with exactly one section per agent, in this form:\n" + "\n".join(form),
            ]
        )

    def parse_completion(self, text: str, item: Mapping[str, Any], num_agents: int) -> list[str]:
        """What stands between each agent's first opening tag and the next closing one, stripped, in time linear in `text`.

        Case does not matter, nor does white space inside the brackets. An agent without a section gets "".

        Raises:
            CentralizedComparatorParseError: no agent has a section.
        """
        wanted = {str(i) for i in range(num_agents)}
        begins: dict[str, int] = {}
        found: dict[str, str] = {}
        for tag in _TAG.finditer(text):
            closing, name = tag.groups()  # names stay strings: agent_01 is not agent_1, and no number is too long
            if name not in wanted:
                continue
            if not closing:
                begins.setdefault(name, tag.end())
            elif name in begins and name not in found:
                found[name] = text[begins[name] : tag.start()].strip()
        if not found:
            raise CentralizedComparatorParseError(
                f"no section <agent_i> … </agent_i> with i from 0 to {num_agents - 1} in a text of {len(text)} characters"
            )
        return [found.get(str(i), "") for i in range(num_agents)]


def check_adapter(adapter: Any) -> CentralizedComparatorAdapter:
    """The user's adapter, or the tagged one where it is None.

    Raises:
        TypeError: `build_prompt` or `parse_completion` is missing or cannot be called.
    """
    if adapter is None:
        return TaggedCentralizedComparatorAdapter()
    missing = [name for name in _METHODS if not callable(getattr(adapter, name, None))]
    if missing:
        raise TypeError(
            f"{_SETTING}: {adapter!r:.80} has no callable {' and no callable '.join(missing)};"
            " give an object with build_prompt(item, agent_prompts) and parse_completion(text, item, num_agents), or None"
        )
    return adapter


def joint_prompt(
    adapter: CentralizedComparatorAdapter, item: Mapping[str, Any], agent_prompts: Sequence[str], where: str
) -> str:
    """The adapter's prompt of a task.

    Args:
        where: names the task in an error, e.g. "task 3".

    Raises:
        PromptError: `build_prompt` raised, or returned anything but a string with something in it.
    """
    try:
        prompt = call_user(adapter.build_prompt, item, agent_prompts, what=f"{_SETTING}.build_prompt", where=where)
    except UserCodeError as error:
        raise PromptError(str(error)) from error.__cause__
    if not isinstance(prompt, str) or not prompt.strip():
        returned = "a blank string" if isinstance(prompt, str) else type(prompt).__name__
        raise PromptError(
            f"{where}: {_SETTING}.build_prompt returned {returned}; return the joint prompt, a string that is not blank"
        )
    return prompt


def parse_joint(
    adapter: CentralizedComparatorAdapter, text: str, item: Mapping[str, Any], num_agents: int, where: str
) -> list[str] | None:
    """The agents' responses in a joint text; None where the adapter finds none, which the caller counts.

    Args:
        where: names the task and the candidate in an error, e.g. "task 3, candidate 0".

    Raises:
        ConfigError: `parse_completion` raised anything else, or returned anything but `num_agents` strings.
    """
    try:
        parsed = call_user(
            adapter.parse_completion, text, item, num_agents, what=f"{_SETTING}.parse_completion", where=where,
            passing=(CentralizedComparatorParseError,),
        )  # fmt: skip
        # A string is a sequence of strings too: with as many letters as agents it would pass for their responses.
        responses = list(parsed) if isinstance(parsed, Sequence) and not isinstance(parsed, (str, bytes)) else None
    except CentralizedComparatorParseError:
        return None
    except UserCodeError as error:
        message = f"{error}; for a text without responses raise CentralizedComparatorParseError"
        raise ConfigError(Problem(_SETTING, message)) from error.__cause__
    if responses is None:
        returned = type(parsed).__name__
    elif len(responses) != num_agents:
        returned = f"{len(responses)} responses for {num_agents} agents"
    elif others := [(i, r) for i, r in enumerate(responses) if not isinstance(r, str)]:
        returned = f"{type(others[0][1]).__name__} for agent {others[0][0]}"
    else:
        return responses
    raise _parse_problem(where, f"returned {returned}; return a list of {num_agents} strings, one per agent")


def _parse_problem(where: str, what: str) -> ConfigError:
    return ConfigError(Problem(_SETTING, f"{where}: parse_completion {what}"))
