"""From task items to each agent's prompt."""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from comlrl_ds.config.errors import ConfigError, Problem
from comlrl_ds.config.task import as_list, task_at
from comlrl_ds.config.user_code import UserCodeError, call_user
from comlrl_ds.preference.tokenizing import PromptError, check_unicode, controls_in, open_ids, opening_ids

Formatter = Callable[..., Any]


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
    """The task's own `prompt`."""
    return item["prompt"]


def check_formatters(formatters: Formatter | Sequence[Formatter] | None, num_agents: int) -> list[Formatter]:
    """One formatter per agent from what the user gave."""
    if formatters is None:
        return [default_formatter] * num_agents
    listed = [formatters] * num_agents if callable(formatters) else as_list(formatters, "formatters", "agent")
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
        writers: what each of them is called in errors; None: agent 0, agent 1 …

    Attributes (of the last `build`):
        dropped, truncated: over-long prompts of either kind, as "task 3, agent 1".
        controls: how often tasks and formatters wrote out the text of each control token, which is read as that token.
    """

    def __init__(
        self, tokenizers: Sequence[Any], formatters: Sequence[Formatter], limits: Sequence[int], overlong: str = "error",
        more: Sequence[str] | None = None, writers: Sequence[str] | None = None,
    ) -> None:  # fmt: skip
        self.tokenizers, self.formatters, self.limits, self.overlong = tokenizers, formatters, limits, overlong
        self._more = more or ["raise rollout.max_model_len"] * len(limits)
        self._writers = writers or [f"agent {i}" for i in range(len(limits))]
        self.dropped: list[str] = []
        self.truncated: list[str] = []
        self.controls: Counter[str] = Counter()

    def build(self, items: Sequence[Mapping[str, Any]], indices: Sequence[int] | None = None) -> list[JointPrompt]:
        """Prompts of the tasks at `indices` (default: all); tasks dropped as over-long are missing."""
        self.dropped, self.truncated, self.controls = [], [], Counter()
        built = (self._joint(k, task_at(items, k)) for k in (range(len(items)) if indices is None else indices))
        return [joint for joint in built if joint is not None]

    def build_some(self, items: Sequence[Mapping[str, Any]], indices: Sequence[int] | None = None) -> list[JointPrompt]:
        """The same; at least one.

        Raises:
            PromptError: there are tasks, and each was dropped.
        """
        built = self.build(items, indices)
        if self.dropped and not built:
            raise PromptError(
                f"none of the {len(self.dropped)} tasks is left: each has a prompt that is too long ({named(self.dropped, 3)}),"
                f" and overlong_prompt is drop; {self._more[0]}, or lower max_new_tokens"
            )
        return built

    def _joint(self, index: int, item: Mapping[str, Any]) -> JointPrompt | None:
        prompts: list[Prompt] = []
        for agent, (tokenizer, formatter, limit) in enumerate(zip(self.tokenizers, self.formatters, self.limits)):
            where = f"task {index}, agent {agent}"
            content = formatted(formatter, item, where)
            prompt = self._fitted(tokenizer, content, limit, f"task {index}, {self._writers[agent]}", self._more[agent])
            if prompt is None:
                return None
            prompts.append(prompt)
        return JointPrompt(index, item, tuple(prompts))

    def _fitted(
        self, tokenizer: Any, content: str | Sequence[Mapping[str, Any]], limit: int, where: str, more: str
    ) -> Prompt | None:
        """A prompt that leaves room for its completion; None where its task is dropped."""
        prompt = encode_prompt(tokenizer, content, where)
        self.controls.update(controls_in(tokenizer, plain_text(content)))
        if len(prompt.ids) <= limit:
            return prompt
        if self.overlong == "error":
            raise PromptError(
                f"{where}: the prompt has {len(prompt.ids)} tokens, but only {limit} leave room for the completion;"
                f" {more}, lower max_new_tokens, or set overlong_prompt to drop or truncate_left"
            )
        if self.overlong == "drop":
            self.dropped.append(where)
            return None
        self.truncated.append(where)
        return truncate_left(tokenizer, prompt, limit)


def named(places: Sequence[str], most: int = 5) -> str:
    """Places of a list for a line: the first few of them, and how many more there are."""
    return "; ".join(places[:most]) + (f"; and {len(places) - most} more" if len(places) > most else "")


class JointPromptBuilder(PromptBuilder):
    """One prompt that asks one writer for every role's response.

    Args:
        tokenizer: the writer's. formatters: one per role. join: (task, role prompts, where) → joint prompt as a text.
        limit: longest prompt in tokens. overlong: as `PromptBuilder`. writer: what it is called in errors.
    """

    def __init__(
        self, tokenizer: Any, formatters: Sequence[Formatter], join: Callable[[Mapping[str, Any], list[str], str], str],
        limit: int, overlong: str = "error", more: Sequence[str] | None = None, writer: str = "agent 0",
    ) -> None:  # fmt: skip
        super().__init__([tokenizer], formatters, [limit], overlong, more, [writer])
        self._join = join

    def _joint(self, index: int, item: Mapping[str, Any]) -> JointPrompt | None:
        contents = [formatted(f, item, f"task {index}, agent {agent}") for agent, f in enumerate(self.formatters)]
        texts = [plain_text(content) for content in contents]
        where = f"task {index}, {self._writers[0]}"
        content: str | list[dict[str, str]] = self._join(item, texts, where)
        if not all(isinstance(c, str) for c in contents):  # chat messages ask for the chat template
            content = [{"role": "user", "content": str(content)}]
        prompt = self._fitted(self.tokenizers[0], content, self.limits[0], where, self._more[0])
        return None if prompt is None else JointPrompt(index, item, (prompt,), tuple(texts))


def plain_text(prompt: str | Sequence[Mapping[str, Any]]) -> str:
    """A formatter's result as one text: chat messages without their roles."""
    return prompt if isinstance(prompt, str) else "\n\n".join("".join(message_texts(m)) for m in prompt)


def formatted(formatter: Formatter, item: Mapping[str, Any], where: str) -> str | list[dict[str, Any]]:
    """What a formatter makes of a task: a string or chat messages.

    Raises:
        PromptError: it raised, or returned anything else.
    """
    prompt = _call(formatter, item, where)
    if isinstance(prompt, str):
        if not prompt.strip():
            raise PromptError(f"{where}: the prompt is empty; the formatter returned {prompt!r}")
        check_unicode(prompt, where)
        return prompt
    if not isinstance(prompt, list | tuple) or not prompt:
        returned = f"an empty {type(prompt).__name__}" if isinstance(prompt, list | tuple) else type(prompt).__name__
        raise PromptError(
            f"{where}: the formatter returned {returned}; return a string or a list of {{'role': …, 'content': …}} messages"
        )
    for k, message in enumerate(prompt):
        _check_message(message, f"{where}, message {k}")
    return [dict(m) for m in prompt]


def _check_message(message: Any, where: str) -> None:
    """Raises PromptError unless it is a chat message whose content is text, or a list of text parts."""
    if not isinstance(message, Mapping) or not {"role", "content"} <= message.keys():
        raise PromptError(f"{where} is {_shown(message)}; a chat message is {{'role': …, 'content': …}}")
    if not isinstance(message["role"], str) or not message["role"]:
        raise PromptError(f"{where}: its role is {_shown(message['role'])}; write a string such as 'user'")
    content = message["content"]
    parts = [content] if isinstance(content, str) else content
    if not isinstance(parts, list | tuple) or not parts:
        raise PromptError(
            f"{where}: its content is {_shown(content)}; write a string, or a list of {{'type': 'text', 'text': …}}"
        )
    for part in parts:
        text = part if isinstance(content, str) else _text_of(part)
        if text is None:
            raise PromptError(f"{where}: its content holds {_shown(part)}; only parts {{'type': 'text', 'text': …}} are text")
        check_unicode(text, where)


def _text_of(part: Any) -> str | None:
    is_text = isinstance(part, Mapping) and part.get("type") == "text" and isinstance(part.get("text"), str)
    return part["text"] if is_text else None


def _shown(value: Any) -> str:
    text = repr(value)
    return f"{type(value).__name__} {text if len(text) <= 60 else text[:57] + '...'}"


def message_texts(message: Mapping[str, Any]) -> list[str]:
    """The texts of a checked chat message."""
    content = message["content"]
    return [content] if isinstance(content, str) else [part["text"] for part in content]


def _call(formatter: Formatter, item: Mapping[str, Any], where: str) -> Any:
    try:
        takes_external = "external_prompts" in inspect.signature(formatter).parameters
    except (TypeError, ValueError):
        takes_external = False
    try:
        if formatter is default_formatter and "prompt" not in item:
            raise PromptError(f"{where}: the task has no 'prompt'; add one, or give formatters that build prompts")
        more = {"external_prompts": None} if takes_external else {}
        return call_user(formatter, item, what="formatter", where=where, keywords=more)
    except UserCodeError as error:
        raise PromptError(str(error)) from error.__cause__


def encode_prompt(tokenizer: Any, prompt: str | Sequence[Mapping[str, str]], where: str = "prompt") -> Prompt:
    """A formatter's result as text and ids, with exactly one BOS where the tokenizer has and adds one.

    A chat template often writes the BOS itself while the tokenizer would add another; a tokenizer without BOS gets none.
    """
    bos = tokenizer.bos_token_id
    if isinstance(prompt, str):
        text, ids = prompt, open_ids(tokenizer, prompt, where)
    else:
        text = _rendered(tokenizer, prompt, where)
        ids = list(tokenizer(text, add_special_tokens=False)["input_ids"])
        if bos is not None and ids[:1] != [bos] and opening_ids(tokenizer)[:1] == [bos]:
            ids = [bos, *ids]
    while bos is not None and ids[:2] == [bos, bos]:
        ids = ids[1:]
    if not ids:
        raise PromptError(f"{where}: the prompt is empty; a completion needs at least one prompt token")
    return Prompt(text, tuple(ids))


def _rendered(tokenizer: Any, messages: Sequence[Mapping[str, Any]], where: str) -> str:
    """Chat messages in the tokenizer's template, with the cue for an answer.

    Raises:
        PromptError: there is no template; it raised; it left out what a message says.
    """
    if not getattr(tokenizer, "chat_template", None):
        raise PromptError(
            f"{where}: the formatter returned chat messages, but the tokenizer has no chat template; return a string"
        )
    try:
        text = tokenizer.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=True)
    except Exception as error:  # a template is a program too, and refuses e.g. a system message in its own way
        raise PromptError(f"{where}: the chat template raised {type(error).__name__}: {error}") from error
    squeezed = "".join(text.split())  # templates trim white space
    for k, message in enumerate(messages):
        # Templates take what an assistant thought out of its earlier answers on purpose.
        if message["role"] == "assistant":
            continue
        # A template that knows no parts writes the list itself, as Python or JSON shows it.
        as_list = not isinstance(message["content"], str) and ("{'type':'text'" in squeezed or '{"type":"text"' in squeezed)
        if as_list or any("".join(t.split()) not in squeezed for t in message_texts(message)):
            how = "; it takes no lists of parts, write a string" if not isinstance(message["content"], str) else ""
            raise PromptError(
                f"{where}: the chat template leaves out or alters the content of message {k} (role {message['role']!r}){how}"
            )
    return text


def truncate_left(tokenizer: Any, prompt: Prompt, limit: int) -> Prompt:
    """The end of a prompt, its BOS kept: the cue for the answer stands last."""
    bos = tokenizer.bos_token_id
    head = prompt.ids[:1] if bos is not None and prompt.ids[0] == bos and limit > 1 else ()
    ids = head + prompt.ids[len(prompt.ids) - limit + len(head) :]
    return Prompt(tokenizer.decode(list(ids), skip_special_tokens=False), ids)
