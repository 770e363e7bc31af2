"""What is sent to a comparator behind HTTP, and what is read from its answers: the four formats."""

from __future__ import annotations

import dataclasses
import json
import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

from comlrl_ds.config.api_settings import APISettings
from comlrl_ds.rollout.base import Sampling

Messages = Sequence[Mapping[str, Any]]
# The reasons that servers give for an answer which its writer ended. Any other one (length, max_tokens, max_output_tokens,
# incomplete, content_filter, refusal …) means that it was cut off.
ENDS = frozenset({"stop", "end_turn", "stop_sequence", "eos", "eos_token", "completed", "complete"})


class Answer(NamedTuple):
    """A text, and whether its writer ended it; False: a token limit or a filter of the server did."""

    text: str
    finished: bool = True


@dataclass(frozen=True)
class APIRequest:
    """What one prompt asks for.

    Attributes:
        index: the task's place in its dataset. item: the task.
        agent: whose prompt it is; of a joint prompt (centralised) `comparator_centralized_agent_index`.
        prompt: a text, or chat messages {"role", "content"}.
        candidates: answers wanted. max_new_tokens: longest answer.
    """

    index: int
    item: Mapping[str, Any]
    agent: int
    prompt: str | Messages
    candidates: int
    max_new_tokens: int


class APIFormat(ABC):
    """One way of asking: `build` makes the HTTP request, `read` takes the texts from its answer."""

    drops_none: ClassVar[bool] = True

    def __init__(self, settings: APISettings, sampling: Sampling) -> None:
        self.settings, self.sampling, self._credential = settings, sampling, settings.credential()

    def build(self, request: APIRequest, count: int) -> tuple[str, dict[str, str], bytes]:
        """(URL, headers, body) that ask for `count` answers; the body is JSON of ASCII characters."""
        body = {**self.fields(request, count), **(self.settings.extra_body or {})}
        if self.drops_none:
            body = {name: value for name, value in body.items() if value is not None}
        assert self.settings.url
        return self.settings.url, self.headers(), json.dumps(body, allow_nan=False).encode("ascii")

    def read(self, answer: Any) -> list[Answer]:
        """The answers in a parsed response; null and empty ones are left out, so too few are left where any is missing."""
        texts, ends = self.texts(answer), self.ends(answer)
        ends += [None] * (len(texts) - len(ends))
        return [Answer(_clean(text), end is None or end in ENDS) for text, end in zip(texts, ends) if text]

    def headers(self) -> dict[str, str]:
        """Content type, the user's headers, then the key's; names differ in more than case."""
        headers = {"Content-Type": "application/json"}
        for name, value in (self.settings.headers or {}).items():
            _set(headers, name, value)
        if self._credential:
            name, prefix = self.key_place()
            _set(headers, name, f"{prefix} {self._credential.reveal()}".strip())
        return headers

    def key_place(self) -> tuple[str, str]:
        """(header, prefix) of the key."""
        return self.settings.key_header, (self.settings.key_prefix or "").strip()

    def per_request(self, candidates: int) -> int:
        """How many of a prompt's answers one HTTP request asks for."""
        return 1

    @abstractmethod
    def fields(self, request: APIRequest, count: int) -> dict[str, Any]:
        """The body before `extra_body`."""

    @abstractmethod
    def texts(self, answer: Any) -> list[str | None]:
        """The answers' texts in order; whatever has another form than this format's gives none."""

    @abstractmethod
    def ends(self, answer: Any) -> list[str | None]:
        """Why each of these texts ended, in the server's word; None where it does not say."""


class Generic(APIFormat):
    """prompt, agent_idx, num_return_sequences, the sampling settings and the task → a list under `response_field`.

    Chat messages go along as `messages`; `prompt` then holds their contents, separated by empty lines.
    """

    drops_none = False

    def per_request(self, candidates: int) -> int:
        return candidates

    def fields(self, request: APIRequest, count: int) -> dict[str, Any]:
        chosen = self.settings.item_fields
        item = request.item if chosen is None else {name: request.item[name] for name in chosen}
        is_text = isinstance(request.prompt, str)
        fields = {
            "prompt": request.prompt if is_text else _contents(_messages(request.prompt)),
            "agent_idx": request.agent,
            "num_return_sequences": count,
            "max_new_tokens": request.max_new_tokens,
            "temperature": self.sampling.temperature,
            "top_p": self.sampling.top_p,
            "top_k": self.sampling.top_k,
            "batch_item": plain(item),
        }
        if not is_text:
            fields["messages"] = _messages(request.prompt)
        if self.settings.model:
            fields["model"] = self.settings.model
        return fields

    def texts(self, answer: Any) -> list[str | None]:
        return [self._text(entry) for entry in self._entries(answer)]

    def ends(self, answer: Any) -> list[str | None]:
        beside = _list(_at(answer, "finish_reasons"))
        named = [_word(_at(e, "finish_reason"), _at(e, "stop_reason")) for e in self._entries(answer)]
        beside += [_word(_at(answer, "finish_reason"), _at(answer, "stop_reason"))] * (len(named) - len(beside))
        return [_word(own, other) for own, other in zip(named, beside)]

    def _entries(self, answer: Any) -> list[Any]:
        found: Any = answer
        for part in self.settings.response_field.split("."):
            found = _at(found, part)
        if found is None:
            usual = (_at(answer, name) for name in ("completions", "responses", "outputs", "choices"))
            found = next((f for f in usual if f is not None), None)
        return [found] if isinstance(found, str) else _list(found)

    @staticmethod
    def _text(entry: Any) -> str | None:
        if isinstance(entry, str):
            return entry
        values = (_at(entry, name) for name in ("text", "content", "completion", "response"))
        return next((t for t in map(_joined, values) if t is not None), _joined(_at(entry, "message", "content")))


class OpenAI(APIFormat):
    """Chat Completions: `n` answers of one request → choices[].message.content, else choices[].text."""

    def per_request(self, candidates: int) -> int:
        settings = self.settings
        is_deepseek = "api.deepseek.com" in (settings.url or "") or (settings.model or "").startswith("deepseek-")
        return min(candidates, settings.max_n_per_request or (1 if is_deepseek else candidates))

    def fields(self, request: APIRequest, count: int) -> dict[str, Any]:
        return {
            "model": self.settings.model,
            "messages": _messages(request.prompt),
            "n": count,
            "max_tokens": request.max_new_tokens,
            "temperature": self.sampling.temperature,
            "top_p": self.sampling.top_p,
        }

    def texts(self, answer: Any) -> list[str | None]:
        choices = _list(_at(answer, "choices"))
        texts = [(_joined(_at(c, "message", "content")), _joined(_at(c, "text"))) for c in choices]
        return [text if content is None else content for content, text in texts]

    def ends(self, answer: Any) -> list[str | None]:
        return [_word(_at(choice, "finish_reason")) for choice in _list(_at(answer, "choices"))]


class Anthropic(APIFormat):
    """Messages: one answer per request → content[] blocks of type text, joined. System messages go where it wants them."""

    def key_place(self) -> tuple[str, str]:
        name, prefix = super().key_place()
        name = "x-api-key" if name.lower() == "authorization" else name
        return name, "" if prefix.lower() == "bearer" else prefix

    def headers(self) -> dict[str, str]:
        headers = super().headers()
        if not any(name.lower() == "anthropic-version" for name in headers):
            headers["anthropic-version"] = "2023-06-01"
        return headers

    def fields(self, request: APIRequest, count: int) -> dict[str, Any]:
        messages = _messages(request.prompt)
        return {
            "model": self.settings.model,
            "max_tokens": request.max_new_tokens,
            "messages": [m for m in messages if m["role"] != "system"],
            "temperature": self.sampling.temperature,
            "system": _contents([m for m in messages if m["role"] == "system"]) or None,
        }

    def texts(self, answer: Any) -> list[str | None]:
        return [_joined([block for block in _list(_at(answer, "content")) if _at(block, "type") == "text"])]

    def ends(self, answer: Any) -> list[str | None]:
        return [_word(_at(answer, "stop_reason"))]


class OpenAIResponses(APIFormat):
    """Responses: one answer per request → output[].content[] blocks of type output_text or text, joined."""

    def fields(self, request: APIRequest, count: int) -> dict[str, Any]:
        return {
            "model": self.settings.model,
            "input": request.prompt if isinstance(request.prompt, str) else _messages(request.prompt),
            "max_output_tokens": request.max_new_tokens,
        }

    def texts(self, answer: Any) -> list[str | None]:
        blocks = [block for entry in _list(_at(answer, "output")) for block in _list(_at(entry, "content"))]
        return [_joined([block for block in blocks if _at(block, "type") in ("output_text", "text")])]

    def ends(self, answer: Any) -> list[str | None]:
        return [_word(_at(answer, "incomplete_details", "reason"), _at(answer, "status"))]


CLASSES: dict[str, type[APIFormat]] = {
    "generic": Generic, "openai": OpenAI, "anthropic": Anthropic, "openai_responses": OpenAIResponses,
}  # fmt: skip


def format_of(settings: APISettings, sampling: Sampling) -> APIFormat:
    """The format that the settings name."""
    return CLASSES[settings.format](settings, sampling)


def plain(value: Any) -> Any:
    """A task's value as JSON has it: arrays become lists, NaN and infinities null, and unknown objects their text."""
    if isinstance(value, str | bool | int) or value is None:
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(name): plain(inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [plain(inner) for inner in value]
    if isinstance(value, set | frozenset):
        return [plain(inner) for inner in sorted(value, key=repr)]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if hasattr(value, "tolist"):  # tensors, arrays and their scalars
        return plain(value.tolist())
    return str(value)


def _set(headers: dict[str, str], name: str, value: str) -> None:
    """Sets a header, whose name has no case."""
    for other in [n for n in headers if n.lower() == name.lower()]:
        del headers[other]
    headers[name] = value


def _messages(prompt: str | Messages) -> list[dict[str, Any]]:
    return [{"role": "user", "content": prompt}] if isinstance(prompt, str) else [dict(m) for m in prompt]


def _contents(messages: Messages) -> str:
    return "\n\n".join(_joined(m["content"]) or "" for m in messages)


def _at(value: Any, *names: str) -> Any:
    for name in names:
        value = value.get(name) if isinstance(value, dict) else None
    return value


def _word(*values: Any) -> str | None:
    """The first of these that is a text."""
    return next((value for value in values if isinstance(value, str)), None)


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _joined(content: Any) -> str | None:
    """A text, or the text blocks of a list in a row: an answer may be cut into blocks in mid-sentence."""
    if isinstance(content, str):
        return content
    texts = [block if isinstance(block, str) else _at(block, "text") for block in _list(content)]
    texts = [text for text in texts if isinstance(text, str)]
    return "".join(texts) if texts else None


def _clean(text: str) -> str:
    """Half a surrogate pair, which JSON can hold, can be neither tokenised nor written."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
