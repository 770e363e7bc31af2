"""The full check of a round file and its ids file, and where each record and its ids lie in them."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

TEXTS = ("prompts", "winner_completions", "loser_completions")
REWARDS = ("winner_reward", "loser_reward", "candidate_reward_mean")
SIDES = ("target_raw_reward", "comparator_raw_reward")
# Columns of an index entry (int64): the record's bytes in the JSON, where the pair comes from; then for each agent the
# prompt's, the winner's and the loser's first byte in the ids file and length in tokens, with 1 where it was finished.
PAIR_COLUMNS = ("start", "end", "item", "winner", "loser")
AGENT_COLUMNS = (
    "prompt", "prompt_tokens", "winner", "winner_tokens", "winner_finished", "loser", "loser_tokens", "loser_finished"
)  # fmt: skip
ID_BYTES = 4
_BLANK = re.compile(r"[ \t\n\r]*")


class RoundFileError(RuntimeError):
    """A round file or its ids file is damaged.

    Args:
        file: which. record: index within `pairs`, None where it is not one record's. field: its field, or the ids tensor.
    """

    def __init__(self, file: Path, message: str, record: int | None = None, field: str | None = None) -> None:
        self.file, self.record, self.field = file, record, field
        parts = [str(file), None if record is None else f"record {record}", field, message]
        super().__init__(": ".join(p for p in parts if p))


def check_file(file: Path, data: bytes, iteration: int, agents: int) -> list[dict[str, Any]]:
    """The records of a whole round file.

    Raises:
        RoundFileError: anything but {"iteration": iteration, "num_pairs": n, "pairs": [n records of so many agents]}.
    """
    try:
        content = json.loads(data.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise RoundFileError(file, f"is not JSON in UTF-8: {error}") from None
    if not isinstance(content, dict):
        raise RoundFileError(file, f"holds {_kind(content)}, not an object")
    for name in ("iteration", "num_pairs", "pairs"):
        if name not in content:
            raise RoundFileError(file, "is missing", field=name)
    pairs = content["pairs"]
    if not isinstance(pairs, list):
        raise RoundFileError(file, f"is {_kind(pairs)}, not a list", field="pairs")
    for name, wanted in (("iteration", iteration), ("num_pairs", len(pairs))):
        if type(content[name]) is not int or content[name] != wanted:
            says = "the file's name" if name == "iteration" else "the length of pairs"
            raise RoundFileError(file, f"is {_short(content[name])}, but {says} says {wanted}", field=name)
    for number, record in enumerate(pairs):
        check_record(file, number, record, agents)
    return pairs


def check_record(file: Path, number: int, record: Any, agents: int) -> None:
    """Raises RoundFileError unless the record has the page's fields: texts of every agent, finite rewards, winner above
    loser. An empty completion is looked at by `locate_ids`: only the ids tell an empty answer from a lost one."""
    if not isinstance(record, dict):
        raise RoundFileError(file, f"is {_kind(record)}, not an object", number)

    def fail(field: str, message: str) -> RoundFileError:
        return RoundFileError(file, message, number, field)

    for name in (*TEXTS, *REWARDS, "raw_rewards", *SIDES):
        if name not in record:
            raise fail(name, "is missing")
    for name in TEXTS:
        texts = record[name]
        if not isinstance(texts, list):
            raise fail(name, f"is {_kind(texts)}, not a list of texts")
        if len(texts) != agents:
            raise fail(name, f"has {len(texts)} entries for {agents} agents")
        for i, text in enumerate(texts):
            if not isinstance(text, str):
                raise fail(f"{name}.{i}", f"is {_kind(text)}, not a text")
            if not _unicode(text):
                raise fail(f"{name}.{i}", "holds half of a surrogate pair, which no tokenizer takes")
    for name in REWARDS:
        if not _finite(record[name]):
            raise fail(name, f"is {_short(record[name])}, not a finite number")
    raw = record["raw_rewards"]
    if not isinstance(raw, list) or len(raw) != 2 or not all(map(_finite, raw)):
        raise fail("raw_rewards", f"is {_short(raw)}, not two finite numbers")
    for name in SIDES:
        if record[name] is not None and not _finite(record[name]):
            raise fail(name, f"is {_short(record[name])}, neither null nor a finite number")
    if (record[SIDES[0]] is None) != (record[SIDES[1]] is None):
        raise fail(SIDES[record[SIDES[0]] is not None], f"is null, but {SIDES[record[SIDES[0]] is None]} is not")
    if record["winner_reward"] <= record["loser_reward"]:
        raise fail("winner_reward", f"is {record['winner_reward']}, not above loser_reward {record['loser_reward']}")


def record_spans(data: bytes) -> list[tuple[int, int]]:
    """First byte and end of each record in a round file that `check_file` has passed."""
    # As Latin-1 a character is a byte, and JSON's own characters stay what they are.
    text, scan = data.decode("latin-1"), json.JSONDecoder().raw_decode

    def blank(at: int) -> int:
        return _BLANK.match(text, at).end()  # type: ignore[union-attr]  # it matches nothing, too

    spans: list[tuple[int, int]] = []
    at = blank(0)
    while text[at] != "}":
        name, at = scan(text, blank(at + 1))
        at = blank(blank(at) + 1)
        if name != "pairs":
            at = blank(scan(text, at)[1])
            continue
        spans = []
        at = blank(at + 1)
        while text[at] != "]":
            end = scan(text, at)[1]
            spans.append((at, end))
            at = blank(end)
            at = blank(at + 1) if text[at] == "," else at
        at = blank(at + 1)
    return spans


def locate_ids(
    file: Path, data: bytes, records_file: Path, records: Sequence[dict[str, Any]], tokenizers: Sequence[Any]
) -> np.ndarray:
    """Index entries of a round, [records, 3 + 8·agents]: PAIR_COLUMNS from "item" on, then AGENT_COLUMNS of each agent.

    Raises:
        RoundFileError: the ids file is damaged or contradicts the records.
    """
    tensors = _Tensors(file, data)
    pairs, items = tensors.take("pairs", "int64", 2), tensors.take("items", "int64")
    if pairs.shape != (len(records), 3):
        raise RoundFileError(
            file, f"has shape {list(pairs.shape)}, but {records_file.name} holds {len(records)} pairs", None, "pairs"
        )
    row_of = {item: row for row, item in enumerate(items.tolist())}
    if len(row_of) != len(items):
        raise RoundFileError(file, "names a task twice", field="items")
    entries = np.zeros((len(records), 3 + len(AGENT_COLUMNS) * len(tokenizers)), dtype="<i8")
    entries[:, :3] = pairs
    if len(records) and not len(items):
        raise RoundFileError(file, f"names no task, but {records_file.name} holds {len(records)} pairs", field="items")
    agents = len(tokenizers) if len(items) else 0  # a round without tasks has no agents' tensors either
    if agents and tensors.has(f"agent_{agents}.finish"):
        raise RoundFileError(file, f"is there, but the team has {agents} agents", field=f"agent_{agents}.finish")
    for i in range(agents):
        prompts = tensors.ranges(f"agent_{i}.prompt", len(items))
        finish = tensors.take(f"agent_{i}.finish", "uint8")
        candidates, rest = divmod(len(finish), len(items))
        if rest:
            raise RoundFileError(file, f"has {len(finish)} entries for {len(items)} tasks", field=f"agent_{i}.finish")
        if (finish > 1).any():
            raise RoundFileError(file, "holds more than 0 (length) and 1 (stop)", field=f"agent_{i}.finish")
        completions = tensors.ranges(f"agent_{i}.completion", len(finish))
        column = 3 + len(AGENT_COLUMNS) * i
        for number, (item, *places) in enumerate(pairs.tolist()):
            if item not in row_of or not all(0 <= place < candidates for place in places):
                raise RoundFileError(file, f"names {[item, *places]} of {candidates} candidates, unknown", number, "pairs")
            row = row_of[item]
            values = list(prompts[row])
            for name, place in zip(TEXTS[1:], places):
                k = row * candidates + place
                start, tokens = completions[k]
                if not tokens:
                    raise RoundFileError(file, f"has no token of {name}.{i}", number, f"agent_{i}.completion_ids")
                values += [start, tokens, int(finish[k])]
                if not records[number][name][i]:
                    sampled = np.frombuffer(data, "<i4", tokens, start).tolist()
                    if finish[k]:
                        del sampled[-1]  # the stop token is in no text
                    if sampled and tokenizers[i].decode(sampled, skip_special_tokens=True):
                        raise RoundFileError(records_file, f"is empty, but has {tokens} ids", number, f"{name}.{i}")
            entries[number, column : column + len(AGENT_COLUMNS)] = values
    return entries


class _Tensors:
    """The tensors of an ids file, and where their bytes lie."""

    def __init__(self, file: Path, data: bytes) -> None:
        from safetensors import SafetensorError
        from safetensors.numpy import load

        self._file = file
        try:
            self._arrays = load(data)
        except (SafetensorError, ValueError, KeyError) as error:
            raise RoundFileError(file, f"is not a safetensors file: {error}") from None
        start = 8 + int.from_bytes(data[:8], "little")
        header = json.loads(data[8:start])
        self._start = {name: start + header[name]["data_offsets"][0] for name in self._arrays}

    def has(self, name: str) -> bool:
        return name in self._arrays

    def take(self, name: str, dtype: str, dimensions: int = 1) -> np.ndarray:
        if name not in self._arrays:
            raise RoundFileError(self._file, "is missing", field=name)
        array = self._arrays[name]
        if array.dtype != dtype or array.ndim != dimensions:
            raise RoundFileError(self._file, f"is {array.dtype} of shape {list(array.shape)}, not {dtype}", field=name)
        return array

    def ranges(self, name: str, count: int) -> list[tuple[int, int]]:
        """(first byte in the file, tokens) of each of `count` sequences of `name`_ids."""
        ids, offsets = self.take(f"{name}_ids", "int32"), self.take(f"{name}_offsets", "int64")
        if (ids < 0).any():
            raise RoundFileError(self._file, "holds negative ids", field=f"{name}_ids")
        lengths = np.diff(offsets)
        if len(offsets) != count + 1 or offsets[0] != 0 or offsets[-1] != len(ids) or (lengths < 0).any():
            message = f"does not cut {len(ids)} ids into {count} sequences"
            raise RoundFileError(self._file, message, field=f"{name}_offsets")
        first = self._start[f"{name}_ids"] + ID_BYTES * offsets[:-1]
        return list(zip(first.tolist(), lengths.tolist()))


def _finite(value: Any) -> bool:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    try:
        return math.isfinite(value)
    except OverflowError:  # a whole number too large for a float
        return False


def _unicode(text: str) -> bool:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True


def _kind(value: Any) -> str:
    names = {type(None): "null", bool: "a boolean", int: "a number", float: "a number", str: "a text", list: "a list"}
    return names.get(type(value), "an object")


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else text[:57] + "..."
