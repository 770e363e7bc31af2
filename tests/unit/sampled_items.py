"""Sampled and scored tasks without an engine, their pairs, and JSON read strictly."""

from __future__ import annotations

import json

from tiny_models import completion

from comlrl_ds.preference.collection import SampledItem
from comlrl_ds.preference.oracle import Score
from comlrl_ds.preference.pairs import pairs_from
from comlrl_ds.preference.prompts import JointPrompt, Prompt


def sampled_item(values, *, index=0, agents=2, raws=None):
    """A task whose completions differ in every agent and candidate; NaN stands for an invalid score."""
    prompts = tuple(Prompt(f"prompt {index}.{i} é", (1, 10 + i, 20 + index)) for i in range(agents))
    item = SampledItem(
        JointPrompt(index, {"prompt": "p"}, prompts),
        [
            [completion([30 + i, 40 + k] + [50] * k, "stop" if k % 2 else "length") for k in range(len(values))]
            for i in range(agents)
        ],
    )
    item.texts = item.written = [[f"answer {i}.{k} ü" for k in range(len(values))] for i in range(agents)]
    item.scores = [Score(v if raws is None else raws[k], v) for k, v in enumerate(values)]
    return item


def collected(items, mode="all", cap=None, fraction=1.0, seed=0, round=1):
    return pairs_from(items, mode=mode, cap=cap, run_seed=seed, round=round, max_invalid_fraction=fraction)


def strict_json(text):
    def refuse(name):
        raise AssertionError(f"{name} is no JSON")

    return json.loads(text, parse_constant=refuse)
