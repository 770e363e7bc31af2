"""Round files read back: the drawn records of a folder, without reading the rest of it.

Beside `iteration_NNNN.json` and its ids file (`write_round`) lies `iteration_NNNN.index`: where every record and its ids
begin. It is made from a full check of both files, and made anew when their sizes or times are not those it was made for.
Whatever is damaged is one `RoundFileError`; nothing is ever replaced by an empty text or a zero.
"""

from __future__ import annotations

import json
import os
import re
import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

from comlrl_ds.config.errors import ConfigError, Problem
from comlrl_ds.maths.packing import PairTokens
from comlrl_ds.preference.records import TOKENIZERS, PreferencePair
from comlrl_ds.preference.round_checks import (
    AGENT_COLUMNS,
    ID_BYTES,
    PAIR_COLUMNS,
    TEXTS,
    RoundFileError,
    check_file,
    check_record,
    locate_ids,
    record_spans,
)
from comlrl_ds.preference.tokenizing import PromptError, answer_ids, completion_text, open_ids, tokenizer_mark
from comlrl_ds.runs.files import write_atomically

_NAME = re.compile(r"iteration_(\d{4,})\.(json|ids\.safetensors)")
_MAGIC = b"rounds 1"
_HEADER = struct.Struct("<8s7q")  # magic, round, pairs, agents, then size and time (ns) of the round file and the ids file
_OWNER = "owner.json"


@dataclass(frozen=True)
class Replayed:
    """Drawn pairs in the order of the draw, and how many of them have ids that another tokenizer made of their texts."""

    pairs: list[PreferencePair]
    changed: int


class RoundFolder:
    """The round files of a folder.

    Args:
        folder: where `write_round` writes.
        tokenizers: one per agent.
    """

    def __init__(self, folder: Path, tokenizers: Sequence[Any]) -> None:
        self.folder, self._tokenizers = folder, list(tokenizers)
        self._marked: dict[int, list[str]] = {}
        self._columns = len(PAIR_COLUMNS) + len(AGENT_COLUMNS) * len(self._tokenizers)

    def file(self, iteration: int) -> Path:
        return self.folder / f"iteration_{iteration:04d}.json"

    def rounds(self) -> list[int]:
        """Numbers of the round files in the folder, in order, whoever wrote them (see `foreign_rounds`)."""
        names = (_NAME.fullmatch(f.name) for f in self.folder.iterdir()) if self.folder.is_dir() else ()
        return sorted(int(m[1]) for m in names if m and m[2] == "json")

    def sizes(self, rounds: Iterable[int]) -> dict[int, int]:
        """Pairs of each round. Reads an index's first 64 bytes, or checks a round whole whose index does not fit."""
        return {r: self._indexed(r) for r in rounds}

    def make_index(self, iteration: int) -> int:
        """Checks a round whole and writes its index; returns its pairs. Best called when the round has been written.

        Raises:
            RoundFileError: a file is missing or damaged.
        """
        file, ids_file = self._files(iteration)
        stamps = _stamp(file) + _stamp(ids_file)  # before reading: what is written meanwhile makes the index unfit
        data = file.read_bytes()
        records = check_file(file, data, iteration, len(self._tokenizers))
        entries = np.zeros((len(records), self._columns), dtype="<i8")
        entries[:, :2] = np.array(record_spans(data), dtype="<i8").reshape(-1, 2)
        entries[:, 2:] = locate_ids(ids_file, ids_file.read_bytes(), file, records, self._tokenizers)
        header = _HEADER.pack(_MAGIC, iteration, len(records), len(self._tokenizers), *stamps)
        write_atomically(file.with_suffix(".index"), header + entries.tobytes())
        return len(records)

    def sampled(self, iteration: int) -> list[PreferencePair]:
        """A round's pairs in the file's order with the ids that were sampled: for the round that sampled them.

        Raises:
            RoundFileError: damage, or a text that is not that of its ids.
        """
        stored = self._read(iteration, range(self._indexed(iteration)))
        for agent in range(len(self._tokenizers)):
            if not self._made_the_ids(iteration, agent):
                message = f"holds ids of another tokenizer than agent {agent}'s; this round has to be sampled anew"
                raise RoundFileError(self._files(iteration)[1], message)
            self._check_texts(stored, agent)
        return [s.pair(s.tokens) for s in stored]

    def replayed(self, drawn: Sequence[tuple[int, int]]) -> Replayed:
        """The drawn pairs with the ids that were sampled, wherever the agent's tokenizer is the one that they are of.

        Other ids are made anew from the texts. A finished answer then ends with the agent's own stop token, and an answer
        whose text gives no token keeps its ids: they are all there is of it.

        Args:
            drawn: (round, record index), with repetitions.

        Raises:
            RoundFileError: damage; ids that neither the text gives nor give the text.
        """
        wanted: dict[int, set[int]] = {}
        for r, number in drawn:
            wanted.setdefault(r, set()).add(number)
        stored = {(r, s.number): s for r in sorted(wanted) for s in self._read(r, sorted(wanted[r]))}
        tokens: dict[tuple[int, int], tuple[PairTokens, ...]] = {}
        for r in sorted(wanted):
            of_round = [s for key, s in stored.items() if key[0] == r]
            columns = [self._tokens(r, of_round, agent) for agent in range(len(self._tokenizers))]
            tokens |= {(r, s.number): row for s, row in zip(of_round, zip(*columns))}
        pairs = {key: s.pair(tokens[key]) for key, s in stored.items()}
        changed = {key: tokens[key] != s.tokens for key, s in stored.items()}
        return Replayed([pairs[key] for key in drawn], sum(changed[key] for key in drawn))

    def _tokens(self, iteration: int, stored: Sequence[_Stored], agent: int) -> list[PairTokens]:
        """One agent's ids of a round's records: as they are stored, or made anew from the texts by another tokenizer."""
        if self._made_the_ids(iteration, agent):
            self._check_texts(stored, agent)
            return [s.tokens[agent] for s in stored]
        tokenizer, made = self._tokenizers[agent], []
        for s in stored:
            try:
                prompt = tuple(open_ids(tokenizer, s.record["prompts"][agent]))
            except PromptError as error:
                raise RoundFileError(s.file, str(error), s.number, f"prompts.{agent}") from None
            made.append(PairTokens(prompt, *(_anew(tokenizer, side, same=False) for side in s.sides(agent))))
        return made

    def _made_the_ids(self, iteration: int, agent: int) -> bool:
        """Whether the ids of a round are those of the agent's tokenizer; files without a mark are taken to be."""
        marks = self._marks(iteration)
        return not marks or marks[agent] == tokenizer_mark(self._tokenizers[agent])

    def _marks(self, iteration: int) -> list[str]:
        if iteration not in self._marked:
            with _Bytes(self._files(iteration)[1]) as file:
                header = json.loads(file.read(8, int.from_bytes(file.read(0, 8), "little")))
            marks = json.loads((header.get("__metadata__") or {}).get(TOKENIZERS, "[]"))
            self._marked[iteration] = marks if len(marks) == len(self._tokenizers) else []
        return self._marked[iteration]

    def _check_texts(self, stored: Sequence[_Stored], agent: int) -> None:
        """Raises RoundFileError for a text that neither is that of its ids nor gives them."""
        tokenizer = self._tokenizers[agent]
        for side in (side for s in stored for side in s.sides(agent)):
            # A comparator's answer may have been text first, and its ids made from it.
            if not side.is_of(tokenizer) and _anew(tokenizer, side, same=True) != side.ids:
                raise side.contradiction()

    def _files(self, iteration: int) -> tuple[Path, Path]:
        file = self.file(iteration)
        return file, file.with_suffix(".ids.safetensors")

    def _indexed(self, iteration: int) -> int:
        """Pairs of a round whose index fits its files from now on."""
        files = self._files(iteration)
        stamps = _stamp(files[0]) + _stamp(files[1])
        try:
            with _Bytes(files[0].with_suffix(".index")) as index:
                magic, *head = _HEADER.unpack(index.read(0, _HEADER.size))
                count = head[1]
                whole = index.size == _HEADER.size + 8 * self._columns * count
                if whole and (magic, *head) == (_MAGIC, iteration, count, len(self._tokenizers), *stamps):
                    return count
        except (FileNotFoundError, ValueError):
            pass
        return self.make_index(iteration)

    def _read(self, iteration: int, numbers: Sequence[int]) -> list[_Stored]:
        count = self._indexed(iteration)
        if any(not 0 <= n < count for n in numbers):
            raise ValueError(f"{self.file(iteration)} has {count} pairs; asked for {min(numbers)} to {max(numbers)}")
        try:
            return self._read_at(iteration, numbers)
        except (RoundFileError, ValueError):
            # The index was wrong, or a file is: the full check says which record and field.
            self.make_index(iteration)
            return self._read_at(iteration, numbers)

    def _read_at(self, iteration: int, numbers: Sequence[int]) -> list[_Stored]:
        file, ids_file = self._files(iteration)
        stored = []
        with _Bytes(file.with_suffix(".index")) as index, _Bytes(file) as text, _Bytes(ids_file) as ids:
            for number in numbers:
                at = _HEADER.size + 8 * self._columns * number
                start, end, *origin_and_places = np.frombuffer(index.read(at, 8 * self._columns), "<i8").tolist()
                record = json.loads(text.read(start, end - start).decode("utf-8"))
                check_record(file, number, record, len(self._tokenizers))
                places = origin_and_places[3:]
                tokens, finished = [], []
                for p in (places[k : k + len(AGENT_COLUMNS)] for k in range(0, len(places), len(AGENT_COLUMNS))):
                    tokens.append(PairTokens(*(ids.read_ids(*p[k : k + 2]) for k in (0, 2, 5))))
                    finished.append((bool(p[4]), bool(p[7])))
                origin = tuple(origin_and_places[:3])
                stored.append(_Stored(file, number, record, origin, tuple(tokens), tuple(finished)))
        return stored


@dataclass(frozen=True)
class _Side:
    """One agent's completion of a stored pair."""

    file: Path
    number: int
    field: str
    text: str
    ids: tuple[int, ...]
    finished: bool

    def is_of(self, tokenizer: Any) -> bool:
        """Whether the text is that of the ids, as it is written now or, without any special token, was before."""
        plain = tokenizer.decode(list(self.ids), skip_special_tokens=True)
        texts = (completion_text(tokenizer, self.ids, self.finished), plain)
        return self.text in [t.encode("utf-8", "replace").decode("utf-8") for t in texts]

    def contradiction(self) -> RoundFileError:
        return RoundFileError(self.file, "is not the text of the ids that lie beside it", self.number, self.field)


@dataclass(frozen=True)
class _Stored:
    """A record as it lies on disk: `origin` is (item, winner, loser), `finished` (winner, loser) of each agent."""

    file: Path
    number: int
    record: dict[str, Any]
    origin: tuple[int, ...]
    tokens: tuple[PairTokens, ...]
    finished: tuple[tuple[bool, bool], ...]

    def sides(self, agent: int) -> tuple[_Side, _Side]:
        t, ends = self.tokens[agent], self.finished[agent]
        winner, loser = (
            _Side(self.file, self.number, f"{name}.{agent}", self.record[name][agent], tuple(ids), end)
            for name, ids, end in zip(TEXTS[1:], (t.winner, t.loser), ends)
        )
        return winner, loser

    def pair(self, tokens: tuple[PairTokens, ...]) -> PreferencePair:
        item, winner, loser = self.origin
        return PreferencePair(**_page_fields(self.record), tokens=tokens, item=item, winner=winner, loser=loser)


def _page_fields(record: dict[str, Any]) -> dict[str, Any]:
    """The page's nine fields, numbers as floats, whatever else a record may hold."""
    number = lambda x: None if x is None else float(x)  # noqa: E731
    rewards = ("winner_reward", "loser_reward", "candidate_reward_mean", "target_raw_reward", "comparator_raw_reward")
    return (
        {name: list(record[name]) for name in TEXTS}
        | {name: number(record[name]) for name in rewards}
        | {"raw_rewards": [float(x) for x in record["raw_rewards"]]}
    )


def _anew(tokenizer: Any, side: _Side, *, same: bool) -> tuple[int, ...]:
    """Ids of a side's text, with a stop token at the end where the answer was finished.

    Args:
        same: the tokenizer is that of the stored ids, so that the stop token among them is its, too.
    """
    again = tuple(answer_ids(tokenizer, side.text)) if side.text else ()
    if not again:
        return side.ids
    eos = tokenizer.eos_token_id
    stop = side.ids[-1:] if same else () if eos is None else (int(eos),)
    return again + stop if side.finished and again[-1:] != stop else again


def _stamp(file: Path) -> tuple[int, int]:
    """Size in bytes and time of the last change in nanoseconds."""
    try:
        found = file.stat()
    except FileNotFoundError:
        raise RoundFileError(file, "is missing") from None
    return found.st_size, found.st_mtime_ns


class _Bytes:
    """A file of which only what is asked for is read; anything outside is a ValueError."""

    def __init__(self, file: Path) -> None:
        self._fd = os.open(file, os.O_RDONLY)
        self.size = os.fstat(self._fd).st_size

    def read(self, at: int, length: int) -> bytes:
        if not 0 <= at <= at + length <= self.size:
            raise ValueError(f"bytes {at} to {at + length} of {self.size}")
        parts = []
        while length and (part := os.pread(self._fd, length, at)):
            parts.append(part)
            at, length = at + len(part), length - len(part)
        return b"".join(parts)

    def read_ids(self, at: int, tokens: int) -> tuple[int, ...]:
        return tuple(np.frombuffer(self.read(at, ID_BYTES * tokens), "<i4").tolist())

    def __enter__(self) -> _Bytes:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        os.close(self._fd)


# --- whose a folder is
def owner_of(folder: Path) -> str | None:
    """The run that claimed the folder; "" where its note cannot be read, None where nobody did."""
    try:
        content = json.loads((folder / _OWNER).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except ValueError:
        return ""
    run_id = content.get("run_id") if isinstance(content, dict) else None
    return run_id if isinstance(run_id, str) else ""


def foreign_rounds(folder: Path, run_id: str) -> list[Path]:
    """Round files (and ids files) in `folder` that are not this run's, in order.

    Neither their names nor the page's format say whose they are, so a folder belongs to the run that claimed it
    (`owner.json`): all in it is that run's, and what lies in an unclaimed folder is an earlier run's.
    """
    if not folder.is_dir() or owner_of(folder) == run_id:
        return []
    return sorted(f for f in folder.iterdir() if _NAME.fullmatch(f.name))


def claim_folder(folder: Path, run_id: str) -> None:
    """Makes `folder` this run's, now and when it is resumed.

    Raises:
        ConfigError: it is another run's, or holds rounds of one; nothing in it is touched.
    """
    folder.mkdir(parents=True, exist_ok=True)
    if owner_of(folder) == run_id:
        return
    advice = "they are neither imported nor overwritten; give another folder"
    if foreign := foreign_rounds(folder, run_id):
        message = f"{str(folder)!r} holds {len(foreign)} files of an earlier run ({foreign[0].name} …); {advice}"
        raise ConfigError(Problem("preference_replay_dir", message))
    try:
        with open(folder / _OWNER, "x", encoding="utf-8") as f:  # of two runs that start together one fails here
            json.dump({"run_id": run_id}, f)
            f.flush()
            os.fsync(f.fileno())
    except FileExistsError:
        message = f"{str(folder)!r} belongs to another run (owner.json); give another folder"
        raise ConfigError(Problem("preference_replay_dir", message)) from None


def free_folder(folder: Path, run_id: str) -> Path:
    """`folder` if this run may claim it, else its sub-folder `run_<run_id>`; the caller says so where they differ."""
    own = folder / f"run_{run_id}"
    if owner_of(own) == run_id:
        return own
    return own if owner_of(folder) not in (None, run_id) or foreign_rounds(folder, run_id) else folder
