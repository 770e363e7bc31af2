"""What both systems are given, and how both are measured. Imports neither of them."""

from __future__ import annotations

import argparse
import hashlib
import json
import random
import resource
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import psutil

TITLES = {
    "p1": "P1 collection", "p2": "P2 update", "p3": "P3 reward fit", "p4": "P4 policy step", "p5": "P5 rounds",
    "p5-history": "P5 rounds, history",
}  # fmt: skip
AGENTS = 2
LEARNING_RATE = 5e-6
REWARD_LEARNING_RATE = 1e-5
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
    """Of all workloads. collected, compared, step_tokens and round_tokens are tokens of a completion.

    P1: tasks, candidates, collected. P2, P3: pairs, compared, batch. P4: step_*, generations. P5: round_*, round_pairs for
    each task.
    """

    tasks: int = 8
    candidates: int = 8
    collected: int = 32
    pairs: int = 8
    compared: int = 64
    batch: int = 4
    step_tasks: int = 2
    generations: int = 4
    step_tokens: int = 128
    round_tasks: int = 4
    round_candidates: int = 4
    round_pairs: int = 2
    round_tokens: int = 32


# First line of what reward models read, instead of each system's own: so both read the same tokens.
TITLE = "What every agent was asked, and what it answered."


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


def dataset(workload: str, size: Size) -> list[dict[str, Any]]:
    return tasks({"p4": size.step_tasks, "p5": size.round_tasks, "p5-history": size.round_tasks}.get(workload, size.tasks))


def settings(workload: str, size: Size, passes: int) -> dict[str, Any]:
    """Settings of a trainer of either system: both read the same names."""
    found = SAMPLING | {
        "num_agents": AGENTS, "preference_num_candidates": size.candidates, "preference_pairs_per_sample": 1,
        "pair_selection": "reward_gap", "max_new_tokens": size.collected if workload == "p1" else size.compared,
        "num_train_epochs": 1, "train_batch_size": size.batch, "agent_learning_rate": LEARNING_RATE, "eval_interval": 0,
    }  # fmt: skip
    if workload in ("p3", "p4"):
        found |= {
            "num_iterations": passes, "reward_num_train_epochs": 1, "reward_train_batch_size": size.batch,
            "reward_learning_rate": REWARD_LEARNING_RATE, "rl_algorithm": "magrpo", "num_generations": size.generations,
        }  # fmt: skip
    if workload == "p4":
        found |= {"max_new_tokens": size.step_tokens, "rollout_buffer_size": 2, "train_batch_size": 2}
    if workload in ("p5", "p5-history"):
        found |= {
            "num_iterations": passes, "preference_num_candidates": size.round_candidates,
            "preference_pairs_per_sample": size.round_pairs, "pair_selection": "comparator_reward",
            "max_new_tokens": size.round_tokens, "train_batch_size": 2, "preference_replay_mode": "all_history",
            "comparator_policy": "current" if workload == "p5" else "history",
        }  # fmt: skip
    return found


def expected_work(workload: str, size: Size, passes: int) -> int | str | None:
    """`Measurement.work` of a process that did all; None where it is a digest."""
    if workload == "p1":
        return AGENTS * size.tasks * size.candidates * size.collected
    if workload == "p4":
        return AGENTS * size.step_tasks * size.generations * size.step_tokens
    if workload in ("p5", "p5-history"):
        tokens = AGENTS * size.round_tasks * 2 * size.round_candidates * size.round_tokens  # 2: the agents, the comparator
        return work_of_rounds(passes * tokens, passes * size.round_tasks * size.round_pairs)
    return None


def work_of_rounds(tokens: int, pairs: int) -> str:
    return f"{tokens} tokens sampled, {pairs} pairs trained on"


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

    A round of P5 is a pass. `work` is the number of tokens that a pass sampled (P1, P4), the digest of the token ids that
    were trained on (P2, P3), or `work_of_rounds` of all passes (P5). `disk_mb` are files that the passes left (P5).
    """

    wall_s: list[float] = field(default_factory=list)
    cpu_s: list[float] = field(default_factory=list)
    others_cpu_s: list[float] = field(default_factory=list)
    start_s: float = 0.0
    peak_mb: float = 0.0
    trainer_peak_mb: float = 0.0
    disk_mb: float = 0.0
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

    @contextmanager
    def passes_of(self, count: int, children_cpu_s: Callable[[], float] = lambda: 0.0) -> Iterator[Callable[[], None]]:
        """Times `count` passes of a loop that is somebody else's, which has to call what this gives at the end of each."""
        with ExitStack() as running:
            running.enter_context(self.one_pass(children_cpu_s))

            def end_of_pass() -> None:
                running.close()
                if len(self.wall_s) < count:
                    running.enter_context(self.one_pass(children_cpu_s))

            yield end_of_pass

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


def folder_mb(folder: str | Path) -> float:
    return sum(file.stat().st_size for file in Path(folder).rglob("*") if file.is_file()) / 2**20


def driver_arguments() -> tuple[argparse.Namespace, Size]:
    parser = argparse.ArgumentParser()
    parser.add_argument("workload", choices=tuple(TITLES))
    parser.add_argument("--model", required=True)
    parser.add_argument("--dtype", choices=("default", "float32"), required=True)
    parser.add_argument("--passes", type=int, required=True)
    parser.add_argument("--size", type=json.loads, required=True)
    arguments = parser.parse_args()
    return arguments, Size(**arguments.size)
