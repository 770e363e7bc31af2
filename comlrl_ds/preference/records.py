"""Preference pairs and the round files that hold them."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from comlrl_ds.maths.packing import PairTokens
from comlrl_ds.preference.tokenizing import tokenizer_mark
from comlrl_ds.runs.files import write_atomically

if TYPE_CHECKING:
    from comlrl_ds.preference.collection import SampledItem

FINISH_REASONS = ("length", "stop")
TOKENIZERS = "tokenizers"  # name of the marks in an ids file's metadata


@dataclass(frozen=True)
class PreferencePair:
    """Two joint responses to one task, the better one first. Lists have one entry per agent.

    The first nine fields are the page's record; `tokens` holds the sampled ids that training uses, and
    (item, winner, loser) says where the pair came from.
    """

    prompts: list[str]
    winner_completions: list[str]
    loser_completions: list[str]
    winner_reward: float
    loser_reward: float
    candidate_reward_mean: float
    raw_rewards: list[float]
    target_raw_reward: float | None
    comparator_raw_reward: float | None
    tokens: tuple[PairTokens, ...]
    item: int
    winner: int
    loser: int

    def record(self) -> dict[str, Any]:
        """The page's record."""
        names = (
            "prompts winner_completions loser_completions winner_reward loser_reward candidate_reward_mean raw_rewards"
            " target_raw_reward comparator_raw_reward"
        )
        return {name: getattr(self, name) for name in names.split()}

    @property
    def empty_sides(self) -> int:
        """Completions of at most one token: nothing of them is scored unless the last token counts."""
        return sum(len(side) <= 1 for t in self.tokens for side in (t.winner, t.loser))


def make_pair(sampled: SampledItem, winner: int, loser: int) -> PreferencePair:
    """The pair of two candidates of a scored task."""
    agents = range(len(sampled.joint.prompts))
    finite = [s.value for s in sampled.scores if s.valid]
    return PreferencePair(
        prompts=[p.text for p in sampled.joint.prompts],
        winner_completions=[sampled.written[i][winner] for i in agents],
        loser_completions=[sampled.written[i][loser] for i in agents],
        winner_reward=sampled.scores[winner].value,
        loser_reward=sampled.scores[loser].value,
        candidate_reward_mean=math.fsum(finite) / len(finite),
        raw_rewards=[sampled.scores[winner].raw, sampled.scores[loser].raw],
        target_raw_reward=None,
        comparator_raw_reward=None,
        tokens=tuple(
            PairTokens(sampled.joint.prompts[i].ids, sampled.completions[i][winner].ids, sampled.completions[i][loser].ids)
            for i in agents
        ),
        item=sampled.joint.index,
        winner=winner,
        loser=loser,
    )


def write_round(
    folder: Path, iteration: int, pairs: Sequence[PreferencePair], sampled: Sequence[SampledItem],
    tokenizers: Sequence[Any] = (),
) -> Path:  # fmt: skip
    """Writes `iteration_NNNN.json` (the page's format) and `iteration_NNNN.ids.safetensors` beside it.

    The ids file holds what was sampled, so that a resumed round trains on the same tokens: for each agent a all token
    ids of its prompts and completions, flat, with their offsets; `agent_a.finish` (0 length, 1 stop); `items` [tasks];
    `pairs` [pairs, 3] = (task, winner, loser). Its metadata has a mark of each agent's tokenizer, whose ids these are.

    Args:
        tokenizers: the agents'.
    """
    import torch
    from safetensors.torch import save

    folder.mkdir(parents=True, exist_ok=True)
    as_int = lambda values: torch.tensor(values, dtype=torch.int64)  # noqa: E731
    tensors = {
        "items": as_int([s.joint.index for s in sampled]),
        "pairs": as_int([[p.item, p.winner, p.loser] for p in pairs]).reshape(-1, 3),
    }
    for i in range(len(sampled[0].joint.prompts) if sampled else 0):
        completions = [c for s in sampled for c in s.completions[i]]
        for name, sequences in (
            ("prompt", [s.joint.prompts[i].ids for s in sampled]),
            ("completion", [c.ids for c in completions]),
        ):
            offsets = [0]
            for ids in sequences:
                offsets.append(offsets[-1] + len(ids))
            tensors[f"agent_{i}.{name}_ids"] = torch.tensor([t for ids in sequences for t in ids], dtype=torch.int32)
            tensors[f"agent_{i}.{name}_offsets"] = as_int(offsets)
        tensors[f"agent_{i}.finish"] = torch.tensor(
            [FINISH_REASONS.index(c.finish_reason) for c in completions], dtype=torch.uint8
        )
    file = folder / f"iteration_{iteration:04d}.json"
    marks = {TOKENIZERS: json.dumps([tokenizer_mark(t) for t in tokenizers])} if tokenizers else None
    write_atomically(file.with_suffix(".ids.safetensors"), save(tensors, marks))
    content = {"iteration": iteration, "num_pairs": len(pairs), "pairs": [p.record() for p in pairs]}
    write_atomically(
        file, json.dumps(content, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode("utf-8", "replace")
    )
    return file
