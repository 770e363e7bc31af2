"""From task items to each agent's prompt."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from comlrl_ds.config.errors import ConfigError, Problem

Formatter = Callable[..., Any]


class PromptError(ConfigError):
    """A formatter or a task that gives no usable prompt; names the task and the agent."""

    def __init__(self, message: str) -> None:
        super().__init__(Problem("", message))


@dataclass(frozen=True)
class Prompt:
    """What an agent is given: the text as the model sees it, and its token ids."""

    text: str
    ids: tuple[int, ...]


@dataclass(frozen=True)
class JointPrompt:
    """One task with every writer's prompt.

    Attributes:
        index: the task's place in its dataset.
        roles: each role's prompt as a text, where one writer's prompt holds them all; None: the prompts are the roles'.
    """

    index: int
    item: Mapping[str, Any]
    prompts: tuple[Prompt, ...]
    roles: tuple[str, ...] | None = None

    @property
    def role_texts(self) -> list[str]:
        """Each role's prompt as a text."""
        return [p.text for p in self.prompts] if self.roles is None else list(self.roles)


def default_formatter(item: Mapping[str, Any]) -> str:
    """The page's default: the task's own `prompt`."""
    return item.get("prompt", "")


def check_formatters(formatters: Formatter | Sequence[Formatter] | None, num_agents: int) -> list[Formatter]:
    """One formatter per agent from what the user gave."""
    if formatters is None:
        return [default_formatter] * num_agents
    listed = [formatters] * num_agents if callable(formatters) else list(formatters)
    if len(listed) != num_agents:
        raise ConfigError(Problem("formatters", f"{len(listed)} formatters for {num_agents} agents; give one, or {num_agents}"))
    for i, formatter in enumerate(listed):
        if not callable(formatter):
            raise ConfigError(Problem(f"formatters.{i}", f"{formatter!r} is not callable"))
    return listed


class PromptBuilder:
    """Formats and tokenises tasks for every agent.

    A formatter returns a string, used as it is, or a list of chat messages, to which the tokenizer's chat template is
    applied with a generation prompt. Either way the ids start with exactly one BOS where the tokenizer adds one.

    Args:
        tokenizers: one per agent.
        formatters: one per agent.
        limits: longest prompt of each agent in tokens; what is longer is treated as `overlong` says.
        overlong: "error" | "drop" | "truncate_left".
        more: what to do for longer prompts of each agent, for the error.
    """

    def __init__(
        self, tokenizers: Sequence[Any], formatters: Sequence[Formatter], limits: Sequence[int], overlong: str = "error",
        more: Sequence[str] | None = None,
    ) -> None:  # fmt: skip
        self.tokenizers, self.formatters, self.limits, self.overlong = tokenizers, formatters, limits, overlong
        self._more = more or ["raise rollout.max_model_len"] * len(limits)
        self.dropped = self.truncated = 0

    def build(self, items: Sequence[Mapping[str, Any]], indices: Sequence[int] | None = None) -> list[JointPrompt]:
        """Prompts of the tasks at `indices` (default: all); tasks dropped as over-long are missing."""
        built = (self._joint(k, items[k]) for k in (range(len(items)) if indices is None else indices))
        return [joint for joint in built if joint is not None]

    def _joint(self, index: int, item: Mapping[str, Any]) -> JointPrompt | None:
        prompts: list[Prompt] = []
        for agent, (tokenizer, formatter, limit) in enumerate(zip(self.tokenizers, self.formatters, self.limits)):
            where = f"task {index}, agent {agent}"
            prompt = self._fitted(tokenizer, formatted(formatter, item, where), limit, where, self._more[agent])
            if prompt is None:
                return None
            prompts.append(prompt)
        return JointPrompt(index, item, tuple(prompts))

    def _fitted(
        self, tokenizer: Any, content: str | Sequence[Mapping[str, Any]], limit: int, where: str, more: str
    ) -> Prompt | None:
        """A prompt that leaves room for its completion; None where its task is dropped."""
        prompt = encode_prompt(tokenizer, content, where)
        if len(prompt.ids) <= limit:
            return prompt
        if self.overlong == "error":
            raise PromptError(
                f"{where}: the prompt has {len(prompt.ids)} tokens, but only {limit} leave room for the completion;"
                f" {more}, lower max_new_tokens, or set overlong_prompt to drop or truncate_left"
            )
        if self.overlong == "drop":
            self.dropped += 1
            return None
        self.truncated += 1
        return truncate_left(tokenizer, prompt, limit)


class JointPromptBuilder(PromptBuilder):
    """One prompt that asks one writer for every role's response.

    Args:
        tokenizer: the writer's. formatters: one per role. join: (task, role prompts, where) → joint prompt as a text.
        limit: longest prompt in tokens. overlong: as `PromptBuilder`.
    """

    def __init__(
        self, tokenizer: Any, formatters: Sequence[Formatter], join: Callable[[Mapping[str, Any], list[str], str], str],
        limit: int, overlong: str = "error", more: Sequence[str] | None = None,
    ) -> None:  # fmt: skip
        super().__init__([tokenizer], formatters, [limit], overlong, more)
        self._join = join

    def _joint(self, index: int, item: Mapping[str, Any]) -> JointPrompt | None:
        contents = [formatted(f, item, f"task {index}, agent {agent}") for agent, f in enumerate(self.formatters)]
        texts = [plain_text(content) for content in contents]
        where = f"task {index}"
        content: str | list[dict[str, str]] = self._join(item, texts, where)
        if not all(isinstance(c, str) for c in contents):  # chat messages ask for the chat template
            content = [{"role": "user", "content": str(content)}]
        prompt = self._fitted(self.tokenizers[0], content, self.limits[0], where, self._more[0])
        return None if prompt is None else JointPrompt(index, item, (prompt,), tuple(texts))


def plain_text(prompt: str | Sequence[Mapping[str, Any]]) -> str:
    """A formatter's result as one text: chat messages without their roles."""
    return prompt if isinstance(prompt, str) else "\n\n".join(str(m["content"]) for m in prompt)


def formatted(formatter: Formatter, item: Mapping[str, Any], where: str) -> str | list[dict[str, Any]]:
    """What a formatter makes of a task: a string or chat messages.

    Raises:
        PromptError: it raised, or returned anything else.
    """
    prompt = _call(formatter, item, where)
    if isinstance(prompt, str):
        return prompt
    if (
        isinstance(prompt, Sequence)
        and prompt
        and all(isinstance(m, Mapping) and {"role", "content"} <= m.keys() for m in prompt)
    ):
        return [dict(m) for m in prompt]
    raise PromptError(
        f"{where}: the formatter returned {type(prompt).__name__};"
        " return a string or a list of {'role': …, 'content': …} messages"
    )


def _call(formatter: Formatter, item: Mapping[str, Any], where: str) -> Any:
    try:
        takes_external = "external_prompts" in inspect.signature(formatter).parameters
    except (TypeError, ValueError):
        takes_external = False
    try:
        return formatter(item, external_prompts=None) if takes_external else formatter(item)
    except Exception as error:  # the user's code: whatever it raises, the task and the agent are named
        raise PromptError(f"{where}: the formatter raised {type(error).__name__}: {error}") from error


def encode_prompt(tokenizer: Any, prompt: str | Sequence[Mapping[str, str]], where: str = "prompt") -> Prompt:
    """A formatter's result as text and ids, with exactly one BOS where the tokenizer has and adds one.

    A chat template often writes the BOS itself while the tokenizer would add another; a tokenizer without BOS gets none.
    """
    bos = tokenizer.bos_token_id
    if isinstance(prompt, str):
        text, ids = prompt, list(tokenizer(prompt)["input_ids"])
    else:
        if not getattr(tokenizer, "chat_template", None):
            raise PromptError(
                f"{where}: the formatter returned chat messages, but the tokenizer has no chat template; return a string"
            )
        try:
            text = tokenizer.apply_chat_template(list(prompt), tokenize=False, add_generation_prompt=True)
        except Exception as error:  # a template is a program too, and refuses e.g. a system message in its own way
            raise PromptError(f"{where}: the chat template raised {type(error).__name__}: {error}") from error
        ids = list(tokenizer(text, add_special_tokens=False)["input_ids"])
        if bos is not None and ids[:1] != [bos] and list(tokenizer("")["input_ids"])[:1] == [bos]:
            ids = [bos, *ids]
    while bos is not None and ids[:2] == [bos, bos]:
        ids = ids[1:]
    if not ids:
        raise PromptError(f"{where}: the prompt is empty; a completion needs at least one prompt token")
    return Prompt(text, tuple(ids))


def truncate_left(tokenizer: Any, prompt: Prompt, limit: int) -> Prompt:
    """The end of a prompt, its BOS kept: the cue for the answer stands last."""
    bos = tokenizer.bos_token_id
    head = prompt.ids[:1] if bos is not None and prompt.ids[0] == bos and limit > 1 else ()
    ids = head + prompt.ids[len(prompt.ids) - limit + len(head) :]
    return Prompt(tokenizer.decode(list(ids), skip_special_tokens=False), ids)
