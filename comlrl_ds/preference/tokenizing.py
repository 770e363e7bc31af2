"""From text to token ids: prompts that end open, and answers in which nothing is read as a control token."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
from itertools import pairwise
from typing import Any

from comlrl_ds.config.errors import ConfigError, Problem


class PromptError(ConfigError):
    """A formatter or a task that gives no usable prompt; names the task and the agent."""

    def __init__(self, message: str) -> None:
        super().__init__(Problem("", message))


def check_unicode(text: str, where: str) -> None:
    """Raises PromptError for a text that UTF-8 cannot hold.

    Half a surrogate pair (one half of an emoji, from text that was cut in the middle) is the only such character.
    """
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        near = text[max(0, error.start - 10) : error.start].encode("utf-8", "replace").decode()
        raise PromptError(
            f"{where}: character {error.start} of the text, after {near!r}, is half of a surrogate pair"
            f" (U+{ord(text[error.start]):04X}), which no tokenizer takes; remove it, or restore the whole character"
        ) from None


def control_tokens(tokenizer: Any) -> Mapping[str, int]:
    """Texts of a tokenizer's control tokens, with their ids: all special tokens but the one for unknown words."""
    return _controls(tokenizer, len(tokenizer))


@lru_cache(maxsize=32)
def _controls(tokenizer: Any, size: int) -> Mapping[str, int]:
    special = set(tokenizer.all_special_ids)
    special |= {int(i) for i, token in getattr(tokenizer, "added_tokens_decoder", {}).items() if token.special}
    special -= {getattr(tokenizer, "unk_token_id", None)}
    texts = {str(tokenizer.convert_ids_to_tokens(i)): i for i in sorted(special)}
    return {text: i for text, i in texts.items() if text}


@lru_cache(maxsize=32)
def _pattern(texts: tuple[str, ...]) -> re.Pattern[str] | None:
    return re.compile("|".join(map(re.escape, sorted(texts, key=len, reverse=True)))) if texts else None


def controls_in(tokenizer: Any, text: str) -> list[str]:
    """The control tokens whose texts stand in a text, in order."""
    pattern = _pattern(tuple(control_tokens(tokenizer)))
    return pattern.findall(text) if pattern else []


def answer_ids(tokenizer: Any, text: str, where: str = "answer") -> list[int]:
    """Token ids of a text that somebody else wrote. The text of a control token is text there, and never that token.

    Raises:
        PromptError: half a surrogate pair; a tokenizer that reads the text of a control token in no other way.
    """
    check_unicode(text, where)
    plain = list(tokenizer(text, add_special_tokens=False)["input_ids"])
    controls = set(control_tokens(tokenizer).values())
    if controls.isdisjoint(plain):
        return plain
    split = list(tokenizer(text, add_special_tokens=False, split_special_tokens=True)["input_ids"])
    if controls.isdisjoint(split):
        return split
    # Some tokenizers have these texts as words of their vocabulary, too. Cut apart, a text is none of them.
    pattern = _pattern(tuple(control_tokens(tokenizer)))
    assert pattern
    cuts = [0, *(m.start() + k for m in pattern.finditer(text) for k in range(1, len(m[0]))), len(text)]
    pieces = [text[a:b] for a, b in pairwise(cuts)]
    ids = [i for piece in pieces for i in tokenizer(piece, add_special_tokens=False)["input_ids"]]
    if not controls.isdisjoint(ids):
        found = ", ".join(map(repr, dict.fromkeys(controls_in(tokenizer, text))))
        raise PromptError(f"{where}: the tokenizer reads {found} in this text as control tokens; remove them from the text")
    return ids


def opening_ids(tokenizer: Any) -> list[int]:
    """What a tokenizer puts before a text, usually its BOS; what it would put behind one is left out everywhere."""
    sample = "a"
    whole = list(tokenizer(sample)["input_ids"])
    plain = list(tokenizer(sample, add_special_tokens=False)["input_ids"])
    for start in range(len(whole) - len(plain) + 1):
        if whole[start : start + len(plain)] == plain:
            return whole[:start]
    bos = tokenizer.bos_token_id
    return [bos] if bos is not None and whole[:1] == [bos] else []


def open_ids(tokenizer: Any, text: str, where: str = "prompt") -> list[int]:
    """Token ids of a text that goes on: what the tokenizer puts before it, and nothing behind it.

    Control tokens that are written out in the text are read as such, since a person may write a chat format by hand.

    Raises:
        PromptError: half a surrogate pair.
    """
    check_unicode(text, where)
    ids = list(tokenizer(text, add_special_tokens=False)["input_ids"])
    opening = opening_ids(tokenizer)
    return ids if ids[: len(opening)] == opening else opening + ids


def completion_text(tokenizer: Any, ids: Sequence[int], finished: bool) -> str:
    """A completion's text: every token of it but the stop token at its end, special ones such as think markers included.

    Args:
        finished: the last of the ids is a stop token.
    """
    return tokenizer.decode(list(ids[:-1] if finished else ids), skip_special_tokens=False)


def tokenizer_mark(tokenizer: Any) -> str:
    """A hash of what decides which ids a tokenizer gives a text: equal for tokenizers that are the same, wherever they lie."""
    return _mark(tokenizer, len(tokenizer))


@lru_cache(maxsize=32)
def _mark(tokenizer: Any, size: int) -> str:
    backend = getattr(getattr(tokenizer, "backend_tokenizer", None), "to_str", None)
    content = backend() if backend else json.dumps([type(tokenizer).__name__, tokenizer.get_vocab()], sort_keys=True)
    parts = [content, tokenizer.eos_token_id, getattr(tokenizer, "chat_template", None)]
    return hashlib.blake2b(json.dumps(parts, sort_keys=True).encode(), digest_size=16).hexdigest()
