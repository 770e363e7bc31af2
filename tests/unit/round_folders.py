"""Rounds of a small team, written as a run writes them."""

from __future__ import annotations

from tiny_models import completion, word_tokenizer

from comlrl_ds.preference.collection import SampledItem
from comlrl_ds.preference.oracle import Score
from comlrl_ds.preference.pairs import pairs_from
from comlrl_ds.preference.prompts import JointPrompt, encode_prompt
from comlrl_ds.preference.records import write_round
from comlrl_ds.preference.tokenizing import completion_text

EOS = 2
TEAM = [word_tokenizer(), word_tokenizer(adds_bos=False)]


def item_of(index, completions, scores, tokenizers=TEAM, prompt="w5 w6 é"):
    """A task whose completions are [agent][candidate] ids; those that end with an EOS were finished."""
    item = SampledItem(
        JointPrompt(index, {}, tuple(encode_prompt(t, prompt) for t in tokenizers)),
        [[completion(ids, "stop" if ids[-1] == t.eos_token_id else "length") for ids in row]
         for t, row in zip(tokenizers, completions)],
    )  # fmt: skip
    item.texts = [
        [completion_text(t, c.ids, c.finish_reason == "stop") for c in row] for t, row in zip(tokenizers, item.completions)
    ]
    item.written = item.texts
    item.scores = [Score(s, s) for s in scores]
    return item


def some_items(round=0):
    """Two tasks of three candidates: four pairs, two of each agent's three answers finished."""
    rows = lambda first: [[[first + k, 10 + i + round, *([EOS] if k else [])] for k in range(3)] for i in range(2)]  # noqa: E731
    return [item_of(7, rows(20), [1.0, 3.0, 3.0]), item_of(4, rows(30), [2.0, 2.0, 0.5])]


def write(folder, iteration=1, items=None, tokenizers=None):
    items = some_items() if items is None else items
    pairs = pairs_from(items, mode="all", cap=None, run_seed=0, round=iteration, max_invalid_fraction=1.0).pairs
    write_round(folder, iteration, pairs, items, TEAM if tokenizers is None else tokenizers)
    return pairs


def every(folder, iteration=1):
    return [(iteration, k) for k in range(folder.sizes([iteration])[iteration])]
