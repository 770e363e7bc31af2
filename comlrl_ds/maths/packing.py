"""From token ids of prompts and completions to the micro-batches that a model scores.

A *row* is one sequence of a micro-batch. In the shared layout a row is [prompt | winner | loser], or a prompt with any number
of completions: the prompt is computed once, every completion's positions restart after it, and a mask hides completions from
each other. In the rows layout each makes an ordinary row [prompt | completion], for models whose attention takes no such mask.

A completion of n scored tokens needs only its first n−1 tokens as inputs, and position p−1 predicts its first token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

Layout = Literal["shared", "rows"]
Completions = tuple[Sequence[int], Sequence[Sequence[int]]]  # token ids of a prompt and of what was sampled after it


@dataclass(frozen=True)
class PairTokens:
    """Token ids of one agent's part of a pair: its own prompt and its two completions (EOS included if sampled)."""

    prompt: Sequence[int]
    winner: Sequence[int]
    loser: Sequence[int]

    def group(self, score_last_token: bool) -> Completions:
        """The prompt, and the tokens of (winner, loser) that count; all but the last unless `score_last_token`."""
        return self.prompt, (self.winner, self.loser) if score_last_token else (self.winner[:-1], self.loser[:-1])


@dataclass
class MicroBatch:
    """Inputs of one forward. B rows padded on the right to width W; N scored tokens in all.

    ids, positions: [B, W] · visible: [B, W, W] bool (row, query, key) or None for plain causal rows ·
    at: [N] flat indices into B·W of the positions that predict · target: [N] the predicted ids ·
    side: [N] index of the completion; of pairs 2·pair + (0 winner, 1 loser), pair being the index within the micro-step.
    Padding has the number of completions.
    """

    ids: Tensor
    positions: Tensor
    visible: Tensor | None
    at: Tensor
    target: Tensor
    side: Tensor

    @property
    def padded_tokens(self) -> int:
        return self.ids.numel()

    def to(self, device: torch.device | str) -> MicroBatch:
        moved = (None if t is None else t.to(device) for t in vars(self).values())
        return MicroBatch(*moved)  # type: ignore[arg-type]


@dataclass(frozen=True)
class _Row:
    prompt: Sequence[int]
    sides: tuple[tuple[int, Sequence[int]], ...]

    @property
    def length(self) -> int:
        return row_length((self.prompt, [tokens for _, tokens in self.sides]))


def row_length(group: Completions) -> int:
    """Tokens of a prompt's shared row with its completions; one without a scored token makes none."""
    prompt, completions = group
    return len(prompt) + sum(len(tokens) - 1 for tokens in completions if len(tokens))


def pack(groups: Sequence[Completions], layout: Layout) -> MicroBatch:
    """One micro-batch of all completions of some prompts, every token scored.

    Always at least one scored token, so that every rank of a sharded engine runs the same forwards and backwards: where there
    is none, a row of padding, whose `side` is that of no completion.

    Raises:
        ValueError: an empty prompt; nothing could predict its completions' first token.
    """
    rows: list[_Row] = []
    count = 0
    for k, (prompt, completions) in enumerate(groups):
        if not len(prompt):
            raise ValueError(f"prompt {k} is empty; a completion needs at least one prompt token to be scored")
        rows += _rows(prompt, [(count + n, tokens) for n, tokens in enumerate(completions) if len(tokens)], layout)
        count += len(completions)
    return _fill(rows or [_Row((0,), ((count, (0,)),))], layout)


def runs(
    prompts: Sequence[Sequence[int]], completions: Sequence[Sequence[Sequence[int]]], widths: Sequence[int], max_tokens: int,
    *, least: int = 1, most: int | None = None,
) -> list[tuple[int, int]]:  # fmt: skip
    """[first, stop) of the joint responses to a task whose completions share rows, the same for every agent: what costs
    least, of runs of equal size whose rows have at most `max_tokens`, or of one response each.

    A row of W tokens costs about W·(6d + W), d the model's width: a layer's 24·d² and 4·W·d operations per token, since a mask
    saves none. So long completions are better apart.

    Args:
        prompts: [agents] token ids. completions: [agents][G]. widths: d of each agent's model.
        least: runs at least, as far as there are responses. most: responses of a run at most.
    """
    count = len(completions[0])
    best: tuple[float, list[tuple[int, int]]] | None = None
    for size in range(1, count + 1):
        found = [(first, min(first + size, count)) for first in range(0, count, size)]
        lengths = [[row_length((p, c[a:b])) for a, b in found] for p, c in zip(prompts, completions)]
        if size > 1 and (len(found) < min(least, count) or size > (most or size) or max(map(max, lengths)) > max_tokens):
            continue
        cost = sum(w * (6 * d + w) for d, of_agent in zip(widths, lengths) for w in of_agent)
        if best is None or cost < best[0]:
            best = cost, found
    assert best
    return best[1]


def _rows(prompt: Sequence[int], sides: Sequence[tuple[int, Sequence[int]]], layout: Layout) -> list[_Row]:
    if layout == "rows":
        return [_Row(prompt, (side,)) for side in sides]
    return [_Row(prompt, tuple(sides))] if sides else []


def _fill(rows: Sequence[_Row], layout: Layout) -> MicroBatch:
    width = max(row.length for row in rows)
    ids = torch.zeros(len(rows), width, dtype=torch.long)
    positions = torch.arange(width).repeat(len(rows), 1)
    visible = torch.zeros(len(rows), width, width, dtype=torch.bool) if layout == "shared" else None
    at: list[int] = []
    target: list[int] = []
    side: list[int] = []
    for b, row in enumerate(rows):
        p = end = len(row.prompt)
        ids[b, :p] = torch.as_tensor(row.prompt)
        if visible is not None:
            visible[b].fill_diagonal_(True)  # padding sees itself, so that no softmax is over nothing
            visible[b, :p, :p] = torch.ones(p, p, dtype=torch.bool).tril()
        for name, tokens in row.sides:
            n = len(tokens) - 1
            stop = end + n
            ids[b, end:stop] = torch.as_tensor(tokens[:n], dtype=torch.long)
            positions[b, end:stop] = torch.arange(p, p + n)
            if visible is not None:
                visible[b, end:stop, :p] = True
                visible[b, end:stop, end:stop] = torch.ones(n, n, dtype=torch.bool).tril()
            base = b * width
            at += [base + p - 1, *range(base + end, base + stop)]
            target += [int(t) for t in tokens]
            side += [name] * len(tokens)
            end = stop
        if visible is not None:
            # A shared row may be wider than the model is long; its padding must not ask for positions that do not exist.
            positions[b, end:] = 0
    as_long = lambda values: torch.tensor(values, dtype=torch.long)  # noqa: E731
    return MicroBatch(ids, positions, visible, as_long(at), as_long(target), as_long(side))


def pack_sequences(rows: Sequence[Sequence[int]]) -> MicroBatch:
    """Plain rows in which every token but a row's first is scored; `side` is the row. For probes and reference scores."""
    whole = [_Row(row[:1], ((k, row[1:]),)) for k, row in enumerate(rows)]
    return _fill(whole, "rows")


def share_out(lengths: Sequence[int], ranks: int) -> list[list[int]]:
    """Pairs (by index) for each of a group's ranks, by token count: the longest first, each to the rank with least."""
    shares: list[list[int]] = [[] for _ in range(ranks)]
    load = [0] * ranks
    for k in sorted(range(len(lengths)), key=lambda k: (-lengths[k], k)):
        rank = min(range(ranks), key=lambda r: (load[r], r))
        shares[rank].append(k)
        load[rank] += lengths[k]
    return [sorted(share) for share in shares]


def plan_micro_steps(
    lengths: Sequence[Sequence[int]],
    max_tokens: int,
    max_pairs: int | None = None,
    rows_per_pair: int = 1,
    ranks: Sequence[int] | None = None,
) -> list[list[int]]:
    """The joint plan of one batch: which pairs make up each micro-step, the same for every agent.

    Args:
        lengths: [pairs][agents], tokens of the pair's longest row for that agent.
        max_tokens: bound on rows × longest row of one rank's forward, for the worst agent. A pair that alone exceeds it
            still gets a micro-step of its own: it cannot be split.
        max_pairs: bound on the pairs of a micro-step.
        rows_per_pair: 1 in the shared layout, 2 in the rows layout.
        ranks: of each agent's group, which share a micro-step's pairs (`share_out`); None: one each.

    Returns:
        Disjoint lists of pair indices that cover the batch, of similar length within a list.
    """
    order = sorted(range(len(lengths)), key=lambda k: (max(lengths[k]), k))
    steps: list[list[int]] = []
    for k in order:
        if steps:
            now = [*steps[-1], k]
            worst = worst_forward([lengths[j] for j in now], ranks or [1] * len(lengths[k]))
            if worst * rows_per_pair <= max_tokens and len(now) <= (max_pairs or len(now)):
                steps[-1].append(k)
                continue
        steps.append([k])
    return steps


def worst_forward(lengths: Sequence[Sequence[int]], ranks: Sequence[int]) -> int:
    """Padded tokens of the largest forward of any agent and rank that score these pairs together, one row a pair."""
    worst = 0
    for agent, size in enumerate(ranks):
        own = [pair[agent] for pair in lengths]
        worst = max(worst, *(len(share) * max((own[k] for k in share), default=0) for share in share_out(own, size)))
    return worst
