"""Tasks and oracles for run files in tests."""

from __future__ import annotations

import math
import os

TOPICS = ["the tide", "a lighthouse", "bees", "a violin", "bread", "whales", "a compass", "soil"]


def items():
    return [{"prompt": f"Topic: {topic}."} for topic in TOPICS]


def chat(item):
    return [{"role": "user", "content": item["prompt"]}]


def text(item):
    return item["prompt"] + " Answer:"


def letters(first, second):
    """Few equal scores: counts of letters."""
    return [0.01 * len(set(first[0])) + 0.1 * second[0].count("a") + 0.001 * len(second[0])]


def constant(first, second):
    return [1.0]


def sometimes_nan(first, second):
    return [math.nan if len(first[0]) % 2 else letters(first, second)[0]]


def always_nan(first, second):
    return [math.nan]


def fails_on_lighthouse(first, second, batch_items):
    if "lighthouse" in batch_items[0]["prompt"]:
        raise KeyError("no score for it")
    return letters(first, second)


def kills_engines(first, second):
    """Ends this process's engine children, as the kernel would when memory runs out."""
    import psutil

    for child in psutil.Process(os.getpid()).children():
        if "engine_server" in " ".join(child.cmdline()):
            child.kill()
    return letters(first, second)


class Halves:
    """Joins role prompts, and takes the first half of an answer for the first role; what has no letter is no answer."""

    def build_prompt(self, item, agent_prompts):
        return " | ".join(agent_prompts)

    def parse_completion(self, text, item, num_agents):
        from comlrl_ds.trainers.preference import CentralizedComparatorParseError

        if not any(c.isalpha() for c in text):
            raise CentralizedComparatorParseError("no letter")
        half = (len(text) + 1) // 2
        return [text[:half], text[half:]]


def ranged_letters(first, second):
    return letters(first, second)


ranged_letters.reward_range = (0.0, 3.0)
