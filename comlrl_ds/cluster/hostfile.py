"""The ranks of a launch, from a hostfile or a count, numbered as the deepspeed launcher numbers them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from comlrl_ds.cluster.layout import Slot
from comlrl_ds.config.errors import ConfigError, Findings, Problem

OPTION = "--hostfile"
LOCAL = "localhost"


def slots_of_hostfile(path: str | Path) -> list[Slot]:
    """Every rank of a launch over a hostfile ("name slots=N" lines, # comments), in order.

    Raises:
        ConfigError: with every line that is not understood.
    """
    file, found = Path(path), Findings()
    try:
        lines = file.read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "not text"
        raise ConfigError(Problem(OPTION, f"{str(path)!r} cannot be read: {reason}")) from None
    sizes: dict[str, int] = {}
    for number, line in enumerate(lines, 1):
        text = line.partition("#")[0].strip()
        if not text:
            continue
        match = re.fullmatch(r"(\S+)\s+slots=(\d+)", text)
        if match is None:
            found.add(OPTION, f"{path}:{number}: {text!r} is not understood; write 'name slots=N'")
        elif int(match[2]) == 0:
            found.add(OPTION, f"{path}:{number}: {match[1]!r} has no slot; write slots=1 or more, or leave the line out")
        elif match[1] in sizes:
            found.add(OPTION, f"{path}:{number}: {match[1]!r} is listed already; write one line per host")
        else:
            sizes[match[1]] = int(match[2])
    if not sizes and not found.problems:
        found.add(OPTION, f"{path} lists no host; write 'name slots=N' lines")
    found.raise_any()
    return slots_of_hosts(sizes)


def slots_of_hosts(sizes: dict[str, int]) -> list[Slot]:
    """Ranks of hosts with so many slots each, in order.

    The launcher sets LOCAL_RANK to the global rank modulo the slots of the host: a permutation of the host's devices where
    hosts differ in size, not always 0, 1, 2 …
    """
    slots: list[Slot] = []
    for host, size in sizes.items():
        first = len(slots)
        slots += [Slot(rank, host, rank % size) for rank in range(first, first + size)]
    return slots


def slots_of_one_host(n: int, host: str = LOCAL) -> list[Slot]:
    """`n` ranks on one machine."""
    return slots_of_hosts({host: n})


def counted(numbers: Sequence[int], word: str = "rank") -> str:
    """'rank 3', 'ranks 1 and 2', 'ranks 0–3 and 6'."""
    return f"{word}{'s' * (len(numbers) > 1)} {ranges(numbers)}"


def ranges(numbers: Sequence[int]) -> str:
    """'3', '1 and 2', '0–3 and 6'; '' of none."""
    runs: list[list[int]] = []
    for n in sorted(numbers):
        if runs and n == runs[-1][1] + 1:
            runs[-1][1] = n
        else:
            runs.append([n, n])
    parts: list[str] = []
    for first, last in runs:
        parts += [str(first), str(last)] if last == first + 1 else [str(first) if first == last else f"{first}–{last}"]
    return parts[0] if len(parts) == 1 else f"{', '.join(parts[:-1])} and {parts[-1]}" if parts else ""
