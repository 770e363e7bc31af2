"""What both systems are given, and how both are measured. Imports neither of them."""

from __future__ import annotations

import argparse
import hashlib
import json
import random
import resource
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import psutil

AGENTS = 2
LEARNING_RATE = 5e-6
SAMPLING = {"temperature": 0.8, "top_p": 0.95, "top_k": 50}
TOPICS = (
    "the tide", "a lighthouse", "paper making", "bees", "a violin", "glaciers", "coffee", "a bicycle", "lightning", "bread",
    "whales", "a compass", "rainbows", "volcanoes", "a telescope", "soil",
)  # fmt: skip
WORDS = (
    "time", "water", "house", "light", "paper", "music", "river", "field", "stone", "glass", "world", "night", "story", "city",
    "school", "book", "money", "power", "heart", "table", "garden", "winter", "summer", "forest", "island", "bridge",
)  # fmt: skip


@dataclass(frozen=True)
class Size:
    """Of both workloads. P1: tasks, candidates, collected. P2: pairs, compared, batch."""

    tasks: int = 8
    candidates: int = 8
    collected: int = 32
    pairs: int = 8
    compared: int = 64
    batch: int = 4


def tasks(count: int) -> list[dict[str, Any]]:
    return [{"id": i, "prompt": f"Topic: {TOPICS[i % len(TOPICS)]} (#{i})."} for i in range(count)]


def introduce(item: dict[str, Any]) -> str:
    return f"{item['prompt']}\nWrite one short sentence introducing the topic.\nAnswer:"


def inform(item: dict[str, Any]) -> str:
    return f"{item['prompt']}\nWrite one short sentence with a fact about the topic.\nAnswer:"


FORMATTERS = [introduce, inform]


def oracle(first: list[str], second: list[str]) -> list[float]:
    """Few words in common and about 14 different words each score high."""
    scores = []
    for a, b in zip(first, second):
        words = set(a.lower().split()), set(b.lower().split())
        common = len(words[0] & words[1]) / max(1, len(words[0] | words[1]))
        scores.append(round(1.0 - common - sum(abs(len(w) - 14) for w in words) / 28, 4))
    return scores


# Arguments of a trainer of either system.
TEAM = {"num_agents": AGENTS, "reward_func": oracle, "formatters": FORMATTERS}


def settings(workload: str, size: Size) -> dict[str, Any]:
    """Settings of a trainer of either system: both read the same names."""
    return SAMPLING | {
        "num_agents": AGENTS, "preference_num_candidates": size.candidates, "preference_pairs_per_sample": 1,
        "pair_selection": "reward_gap", "max_new_tokens": size.collected if workload == "p1" else size.compared,
        "num_train_epochs": 1, "train_batch_size": size.batch, "agent_learning_rate": LEARNING_RATE, "eval_interval": 0,
    }  # fmt: skip


@dataclass(frozen=True)
class FixedPair:
    """Texts of one pair, one entry per agent."""

    prompts: list[str]
    winners: list[str]
    losers: list[str]


def fixed_pairs(size: Size, tokenizer: Any) -> list[FixedPair]:
    """Pairs whose completions are all `size.compared` tokens long for this tokenizer."""
    words = [w for w in WORDS if len(tokenizer(f" {w}", add_special_tokens=False)["input_ids"]) == 1]
    drawn = random.Random(3)

    def completion() -> str:
        text = "".join(f" {drawn.choice(words)}" for _ in range(size.compared))
        assert len(tokenizer(text, add_special_tokens=False)["input_ids"]) == size.compared
        return text

    return [
        FixedPair([f(item) for f in FORMATTERS], [completion() for _ in FORMATTERS], [completion() for _ in FORMATTERS])
        for item in tasks(size.pairs)
    ]


def digest(sequences: Sequence[Sequence[int]]) -> str:
    """Equal for equal token ids: shows that both systems were given the same work."""
    return hashlib.sha256(json.dumps([[int(t) for t in ids] for ids in sequences]).encode()).hexdigest()[:12]


@dataclass
class Measurement:
    """One process's numbers. Lists have one entry per pass over the same work: the first is cold, later ones are warm.

    `work` is the number of tokens that were sampled (P1), or the digest of the token ids that were trained on (P2).
    """

    wall_s: list[float] = field(default_factory=list)
    cpu_s: list[float] = field(default_factory=list)
    others_cpu_s: list[float] = field(default_factory=list)
    start_s: float = 0.0
    peak_mb: float = 0.0
    trainer_peak_mb: float = 0.0
    dtype: str = ""
    work: int | str = 0

    def started(self) -> None:
        """Everything before this, imports too, is start-up."""
        self.start_s = time.time() - psutil.Process().create_time()

    @contextmanager
    def one_pass(self, children_cpu_s: Callable[[], float] = lambda: 0.0) -> Iterator[None]:
        """Times a pass: wall seconds, and CPU seconds of this process and its children, and of the machine's others."""
        cpu, machine, wall = own_cpu_s() + children_cpu_s(), machine_cpu_s(), time.perf_counter()
        yield
        self.wall_s.append(time.perf_counter() - wall)
        machine = machine_cpu_s() - machine
        self.cpu_s.append(own_cpu_s() + children_cpu_s() - cpu)
        self.others_cpu_s.append(max(0.0, machine - self.cpu_s[-1]))

    def say(self) -> None:
        print("MEASUREMENT " + json.dumps(asdict(self)), flush=True)


def own_cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def machine_cpu_s() -> float:
    times = psutil.cpu_times()
    return times.user + times.nice + times.system


def own_peak_mb() -> float:
    """Peak resident memory of this process. Not ru_maxrss: a child inherits its parent's there."""
    status = Path("/proc/self/status").read_text()
    return next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmHWM")) / 1024


def driver_arguments() -> tuple[argparse.Namespace, Size]:
    parser = argparse.ArgumentParser()
    parser.add_argument("workload", choices=("p1", "p2"))
    parser.add_argument("--model", required=True)
    parser.add_argument("--dtype", choices=("default", "float32"), required=True)
    parser.add_argument("--passes", type=int, required=True)
    parser.add_argument("--size", type=json.loads, required=True)
    arguments = parser.parse_args()
    return arguments, Size(**arguments.size)
