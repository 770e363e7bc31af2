"""What was asked for, as a mark: what a run finds on disk is reused only where the very same thing would be asked for again."""

from __future__ import annotations

import functools
import hashlib
import inspect
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from comlrl_ds.config.user_code import described
from comlrl_ds.preference.api_formats import plain
from comlrl_ds.rollout.base import PolicyWeights, Request, Sampling
from comlrl_ds.rollout.disk import mark_of

if TYPE_CHECKING:
    from comlrl_ds.preference.oracle import Oracle
    from comlrl_ds.preference.prompts import JointPrompt


def mark(*values: Any) -> str:
    """A hash of values that JSON can hold; tasks are taken as they would be sent to an API."""
    text = json.dumps(plain(list(values)), sort_keys=True, separators=(",", ":"))
    return hashlib.blake2b(text.encode(), digest_size=12).hexdigest()


def request_mark(request: Request, sampling: Sampling, policy: PolicyWeights) -> str:
    """Of a completion: its prompt's token ids, limits, stop tokens, sampling settings, and the weights that answer."""
    settings = sampling.as_dict() | {"logprobs": None}  # whether they are wanted changes no sample
    weights = [policy.key, weights_mark(policy.source)]
    return mark(request.prompt, request.max_new_tokens, sorted(request.stop_ids), settings, weights)


def score_mark(joint: JointPrompt, texts: Sequence[str]) -> str:
    """Of a score, beside the reward function: the task, the prompts and the joint response."""
    return mark(joint.item, joint.role_texts, list(texts))


def weights_mark(folder: str) -> str:
    """Of the weights in a folder; cheap to ask for again while its files stay as they are."""
    stats = [(f.name, s.st_size, s.st_mtime_ns) for f in sorted(Path(folder).glob("*")) if f.is_file() and (s := f.stat())]
    return _weights_mark(folder, tuple(stats))


@functools.lru_cache(maxsize=64)
def _weights_mark(folder: str, stats: tuple[tuple[str, int, int], ...]) -> str:
    return mark_of(folder)


@dataclass(frozen=True)
class Identity:
    """Which function gave the scores: its name for people, and a mark of its source."""

    name: str
    mark: str

    def __str__(self) -> str:
        return f"{self.name}, source {self.mark[:8]}"


def identity_of(oracle: Oracle) -> Identity:
    """Of the reward function and the reward processor: their names, the files that define them, and what they hold.

    The whole file counts, since a function may call others beside it.
    """
    functions = [f for f in (oracle.reward_func, oracle.reward_processor) if f is not None]
    return Identity(" and ".join(map(described, functions)), mark(*map(_content, functions)))


def _content(function: Any) -> Any:
    if isinstance(function, functools.partial):
        return ["partial", _content(function.func), _held(function.args), _held(function.keywords)]
    inner = getattr(function, "__wrapped__", function)
    if inner is not function:
        return [_content(inner), _held(getattr(function, "__dict__", {}), leave=("__wrapped__",))]
    code = getattr(function, "__func__", function)
    definition = code if inspect.isroutine(code) or inspect.isclass(code) else type(code)
    cells = [_held(cell.cell_contents) for cell in getattr(code, "__closure__", None) or () if _filled(cell)]
    defaults = _held([getattr(code, "__defaults__", None), getattr(code, "__kwdefaults__", None)])
    own = _held(vars(function)) if hasattr(function, "__dict__") and definition is not code else None
    bound = getattr(function, "__self__", None)
    state = _held(vars(bound)) if hasattr(bound, "__dict__") and not inspect.ismodule(bound) else None
    return [getattr(definition, "__qualname__", str(definition)), _source(definition), cells, defaults, own, state]


def _filled(cell: Any) -> bool:
    try:
        _ = cell.cell_contents
    except ValueError:
        return False
    return True


def _source(definition: Any) -> str:
    """The text of the file that defines it, else its own source, else its byte code."""
    try:
        file = inspect.getsourcefile(definition)
        if file and Path(file).is_file():
            return Path(file).read_text(encoding="utf-8", errors="replace")
        return inspect.getsource(definition)
    except (TypeError, OSError):
        code = getattr(definition, "__code__", None)
        return "" if code is None else repr((code.co_code, code.co_consts, code.co_names))


def _held(value: Any, leave: Sequence[str] = ()) -> Any:
    """Values that a function holds, as far as they say the same in every process: objects count by their kind."""
    if value is None or isinstance(value, str | bool | int | float):
        return value
    if isinstance(value, Mapping):
        return {str(k): _held(v) for k, v in value.items() if k not in leave}
    if isinstance(value, list | tuple | set | frozenset):
        listed = value if isinstance(value, list | tuple) else sorted(value, key=repr)
        return [_held(v) for v in listed]
    return f"{type(value).__module__}.{type(value).__qualname__}" if not callable(value) else getattr(value, "__qualname__", "")
