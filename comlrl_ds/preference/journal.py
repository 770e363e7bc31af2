"""The journal: every completion and score is on disk as soon as it exists, and none of them is paid for twice."""

from __future__ import annotations

import json
import math
import os
import threading
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

from comlrl_ds.preference.api_formats import Answer
from comlrl_ds.preference.oracle import Score
from comlrl_ds.rollout.base import Completion
from comlrl_ds.runs.failure import writing


class JournalError(RuntimeError):
    """A journal that was changed by somebody else; names file and line."""


@dataclass
class Known:
    """What a journal holds, each with the mark of what was asked for (`comlrl_ds.preference.asked`).

    Attributes:
        completions: (seed, mark, completion) by (stream, round, task, agent, candidate).
        scores: (mark, mark of the reward function, score) by (stream, round, task, candidate).
        answers: (mark, answer) of a comparator behind an API by (round, task, agent, candidate).
        functions: names of reward functions by their marks.
        sealed: of each round that is complete and in its round file, what was reported of it.
        asked: of each such round, what it was collected from.
    """

    completions: dict[tuple[str, int, int, int, int], tuple[int, str, Completion]] = field(default_factory=dict)
    scores: dict[tuple[str, int, int, int], tuple[str, str, Score]] = field(default_factory=dict)
    answers: dict[tuple[int, int, int, int], tuple[str, Answer]] = field(default_factory=dict)
    functions: dict[str, str] = field(default_factory=dict)
    sealed: dict[int, dict[str, Any]] = field(default_factory=dict)
    asked: dict[int, dict[str, Any]] = field(default_factory=dict)


class Journal:
    """Appends one JSON object per line; `sync` makes what was written survive a crash of the machine.

    Lines: {"kind": "completion", "stream", "round", "item", "agent", "candidate", "seed", "of", "ids", "finish", "version"},
    with "logprobs" where they were asked for,
    {"kind": "score", "stream", "round", "item", "candidate", "of", "by", "raw", "value"} (null where invalid),
    {"kind": "function", "round", "mark", "name"} of a reward function before its first score,
    {"kind": "answer", "round", "item", "agent", "candidate", "of", "text", "finished"} and
    {"kind": "sealed", "round", "report", "asked"}. "of" and "by" are marks of what was asked for, and of whom.
    """

    def __init__(self, file: Path) -> None:
        file.parent.mkdir(parents=True, exist_ok=True)
        _cut_torn_line(file)
        self._lock, self._path = threading.Lock(), file
        self._file = open(file, "a", encoding="utf-8")  # noqa: SIM115

    def append(self, kind: str, **fields: Any) -> None:
        """One line, handed to the system at once: a killed process loses nothing. NaN and infinities become null."""
        line = json.dumps({"kind": kind, **finite(fields)}, separators=(",", ":"), allow_nan=False) + "\n"
        with self._lock, writing(self._path):  # answers of an API come in a thread of their own
            self._file.write(line)
            self._file.flush()

    def sync(self) -> None:
        with writing(self._path):
            self._file.flush()
            os.fsync(self._file.fileno())

    def __enter__(self) -> Journal:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.sync()
        self._file.close()


def read_journal(file: Path) -> Known:
    """What an interrupted run has sampled and scored already; a last line without its end is what a crash cut off.

    Raises:
        JournalError: any other line that cannot be read.
    """
    known = Known()
    if not file.exists():
        return known
    lines = file.read_bytes().split(b"\n")[:-1]
    for number, line in enumerate(lines, 1):
        try:
            entry = json.loads(line)
            if entry["kind"] == "sealed":
                known.sealed[entry["round"]] = dict(entry["report"])
                known.asked[entry["round"]] = dict(entry.get("asked") or {})
                continue
            if entry["kind"] == "function":
                known.functions[entry["mark"]] = entry["name"]
                continue
            if entry["kind"] == "answer":
                answer = Answer(str(entry["text"]), bool(entry.get("finished", True)))
                where_asked = (entry["round"], entry["item"], entry["agent"], entry["candidate"])
                known.answers[where_asked] = (entry.get("of", ""), answer)
                continue
            where = (entry["stream"], entry["round"], entry["item"])
            if entry["kind"] == "completion":
                scores = tuple(math.nan if x is None else x for x in entry.get("logprobs", ()))
                completion = Completion(tuple(entry["ids"]), entry["finish"], entry["version"], scores)
                found = (entry["seed"], entry.get("of", ""), completion)
                known.completions[(*where, entry["agent"], entry["candidate"])] = found
            elif entry["kind"] == "score":
                raw, value = (math.nan if entry[k] is None else float(entry[k]) for k in ("raw", "value"))
                known.scores[(*where, entry["candidate"])] = (entry.get("of", ""), entry.get("by", ""), Score(raw, value))
        except (ValueError, KeyError, TypeError) as error:
            raise JournalError(f"{file}, line {number} cannot be read: {error}; give another run.dir to start anew") from None
    return known


def finite(value: Any) -> Any:
    """A value of JSON in which null stands for every NaN and infinity."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {name: finite(inner) for name, inner in value.items()}
    return [finite(inner) for inner in value] if isinstance(value, list | tuple) else value


def _cut_torn_line(file: Path) -> None:
    """What a crash left unfinished must not run into what comes next."""
    if not file.exists():
        return
    content = file.read_bytes()
    if content and not content.endswith(b"\n"):
        with open(file, "r+b") as f:
            f.truncate(content.rfind(b"\n") + 1)
