"""One model under one DeepSpeed engine."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from comlrl_ds.cluster.progress import tick
from comlrl_ds.engines.base import ZeroEngine, gathered
from comlrl_ds.engines.dropout import masks_of, published, still
from comlrl_ds.engines.ds_config import EnginePlan
from comlrl_ds.engines.hardware import free_bytes
from comlrl_ds.engines.heads import VALUE_HEAD, save_head
from comlrl_ds.engines.lora import anchored, save_adapter
from comlrl_ds.engines.scorer import Scorer, completion_logprobs, fit_engine, inputs_of
from comlrl_ds.maths.advantages import importance_weights
from comlrl_ds.maths.logprobs import parts_for, sum_by_side
from comlrl_ds.maths.packing import Completions, Layout, PairTokens, pack, pack_sequences, row_length, share_out
from comlrl_ds.runs.failure import writing


@dataclass
class _Graph:
    """The open forward of this rank: what its sides are among those of all ranks, token log-probs, whose each of those is, and
    what it counts beside its side's weight; values, and the sides that they are of.
    """

    sides: list[int]
    logprobs: Tensor
    side: Tensor
    ratios: Tensor | None
    values: Tensor | None
    valued: list[int]


class PolicyEngine(ZeroEngine):
    """An actor: scores pairs, learns, and gives its weights away.

    A step is any number of (`score_pairs`, `backward`), then `step` or `discard`. Every method but `learning_rate` and
    `shape` is a collective of the ranks of its device group, each of which holds an engine of this name.

    Args:
        name: e.g. "actor.0", for messages.
        lm: a transformers causal LM in the plan's compute type.
        plan: from `plan_engine`.
        layout: "auto", "shared" or "rows".
        chunk: tokens that reach the vocabulary at once. host_ranks: ranks that share this machine's memory.
        value_head: makes it its own critic, too.
        dropout_seed: of the masks of the forwards that a step is made of; None: the model has no dropout.
    """

    def __init__(
        self, name: str, lm: Any, plan: EnginePlan, *, layout: str = "auto", chunk: int = 512, host_ranks: int = 1,
        value_head: nn.Module | None = None, dropout_seed: int | None = None,
    ) -> None:  # fmt: skip
        self.scorer, self._host_ranks = Scorer(lm, chunk, value_head), host_ranks
        self._graph: _Graph | None = None
        self._dropout_seed = dropout_seed
        super().__init__(name, self.scorer, lm.config, plan, "lm.")
        self.layout: Layout = fit_engine(name, self.scorer, self._engine, layout, plan.dtype, self.device)

    # --- scoring
    def score_pairs(
        self, pairs: Sequence[PairTokens], score_last_token: bool, grad: bool = False
    ) -> tuple[list[list[float]], int]:
        """Summed log-probs of winners and losers; a collective of the group, whose ranks share the pairs out.

        With `grad` this rank's graph stays for `backward`, one at a time.

        Returns:
            [pairs][2], and the padded tokens of all ranks' forwards.
        """
        found = self._score([p.group(score_last_token) for p in pairs], grad, [], None, None)
        return found["sums"], found["tokens"]

    def score_samples(
        self, groups: Sequence[Completions], grad: bool, sampled: Sequence[Sequence[Sequence[float]]] = (),
        clip: float | None = None, critic_type: str | None = None,
    ) -> dict[str, Any]:  # fmt: skip
        """Summed log-probs of sampled completions, every token counted; see `score_pairs`.

        Args:
            sampled: [groups][completions][tokens] log-probs in the engine that sampled them, or nothing.
            clip: tokens learn with the weight min(p / p_engine, clip), p of this forward and a constant; None: with 1.
            critic_type: "v" values the prompts, "q" the completions' ends; None values nothing.

        Returns:
            "sums" [groups][completions], "values" likewise, "tokens" as above, and "gap": Σ |log p − log p_engine| over the
            tokens whose p_engine is known, and their number.
        """
        return self._score(groups, grad, sampled, clip, critic_type)

    def _score(
        self, groups: Sequence[Completions], grad: bool, sampled: Sequence[Sequence[Sequence[float]]], clip: float | None,
        critic_type: str | None,
    ) -> dict[str, Any]:  # fmt: skip
        if critic_type == "q":
            # A completion's last token is no input of its log-probs, but its value is that of this token: one more follows.
            groups = [(prompt, [(*c, 0) if len(c) else () for c in completions]) for prompt, completions in groups]
        shares = share_out([row_length(g) for g in groups], self.world_size)
        own = shares[self.rank]
        # At ZeRO-3 every call of a module is a collective, so all ranks call the head as often as the one with most tokens.
        scored = [sum(len(c) for k in share for c in groups[k][1]) for share in shares]
        parts = max(parts_for(n, self.scorer.chunk) for n in scored)
        sizes = [len(completions) for _, completions in groups]
        starts = [0, *itertools.accumulate(sizes)]
        mine = [side for k in own for side in range(starts[k], starts[k + 1])]  # what this rank's sides are among all
        packed = pack([groups[k] for k in own], self.layout)
        places = _places(packed.side, len(mine), critic_type)
        if critic_type == "q":
            packed.side[list(places.values())] = len(mine)
        batch = packed.to(self.device)
        extra: dict[str, Any] = {}
        if critic_type is not None:
            extra = {"valued": torch.tensor(list(places.values()) or [0], device=self.device)}
        inputs = inputs_of(batch)
        with torch.set_grad_enabled(grad), masks_of(self._dropout_seed, self.rank, self.version, inputs, self.device):
            found = self._engine(**inputs, parts=parts, **extra)
        logprobs, values = (found, None) if critic_type is None else found
        whole = torch.zeros(2 * starts[-1] + 3, dtype=torch.float64, device=self.device)
        sums, of_values, rest = whole.split([starts[-1], starts[-1], 3])
        sums[mine] = sum_by_side(logprobs.detach(), batch.side, len(mine) + 1)[:-1].double()
        if values is not None and places:
            of_values[[mine[side] for side in places]] = values.detach().double()
        ratios = None
        if len(sampled):
            ratios, gaps = _beside_engine(logprobs.detach(), batch.side, len(mine), [sampled[k] for k in own], clip)
            rest[0], rest[1] = gaps.sum(), len(gaps)
        rest[2] = packed.padded_tokens
        if grad:
            self._graph = _Graph(mine, logprobs, batch.side, ratios, values, list(places))
        if self.world_size > 1:
            torch.distributed.all_reduce(whole)  # every completion is one rank's, so this adds zeros: exact
        tick()
        by_group = [[part.tolist() for part in flat.split(sizes)] for flat in (sums, of_values)]
        return {"sums": by_group[0], "values": by_group[1], "gap": [float(rest[0]), int(rest[1])], "tokens": int(rest[2])}

    def values(self, rows: Sequence[Sequence[int]]) -> list[float]:
        """The value head's value of each row of token ids, at its last token; a collective of the group."""
        with still(self.scorer):
            found = self._score([(row, [(0,)]) for row in rows], False, [], None, "v")
        return [value for (value,) in found["values"]]

    @torch.no_grad()
    def token_logprobs(self, rows: Sequence[Sequence[int]]) -> list[list[float]]:
        """log p of every token of a row but its first, without dropout."""
        batch = pack_sequences(rows).to(self.device)
        with still(self.scorer):
            scores = self._engine(**inputs_of(batch))
        return [scores[batch.side == k].tolist() for k in range(len(rows))]

    def completion_logprobs(self, groups: Sequence[Completions]) -> list[list[list[float]]]:
        """log p of every token of each completion; a collective of the group, whose ranks share the prompts out."""
        with still(self.scorer):
            return completion_logprobs(
                self._engine, self.scorer.chunk, groups, self.layout, self.rank, self.world_size, self.device
            )

    def anchor_logprobs(self, groups: Sequence[Completions]) -> list[list[list[float]]]:
        """The same by the policy as it was at first: with LoRA that is this model without what it has learned."""
        with anchored(self.scorer):
            return self.completion_logprobs(groups)

    # --- learning
    def backward(self, weights: Sequence[Sequence[float]], value_weights: Sequence[Sequence[float]] = ()) -> None:
        """Gradient of Σ weights · log-probs + Σ value_weights · values over what was scored last, added to the
        step's.

        One backward per forward: at ZeRO-3 two open forwards with two backwards give silently wrong gradients.

        Args:
            weights, value_weights: [groups][completions] (pairs: [pairs][2]), ∂loss/∂log-prob and ∂loss/∂value over the whole
                batch of the step.
        """
        graph, self._graph = self._graph, None
        assert graph
        flat, of_values = ([w for group in of_groups for w in group] for of_groups in (weights, value_weights))
        own = torch.tensor([*(flat[side] for side in graph.sides), 0.0], dtype=torch.float64)  # last: of padding
        per_token = own[graph.side.to("cpu")].to(graph.logprobs)
        if graph.ratios is not None:
            per_token = per_token * graph.ratios
        total = (graph.logprobs * per_token).sum()
        if graph.values is not None:
            of = [of_values[graph.sides[s]] for s in graph.valued] or [0.0]
            total = total + (graph.values * torch.tensor(of, dtype=torch.float64).to(graph.values)).sum()
        self._learn(total)

    def learn_pairs(self, pairs: Sequence[PairTokens], score_last_token: bool, weights: Sequence[Sequence[float]]) -> int:
        """Scores pairs and learns from them in one go; returns the padded tokens."""
        _, tokens = self.score_pairs(pairs, score_last_token, grad=True)
        self.backward(weights)
        return tokens

    def _drop_graph(self) -> None:
        self._graph = None

    def budget(self) -> dict[str, Any]:
        """What the learner plans with: how rows are laid out, the ranks that share them, bytes that graphs may take on this
        rank, and bytes of a graph per token.
        """
        # The first steps will still allocate fp32 gradients and two fp32 optimizer states.
        elements = sum(getattr(p, "ds_numel", p.numel()) for p in self.scorer.parameters() if p.requires_grad)
        missing = 0 if self.version else 12 * elements // self.world_size
        config = self.scorer.lm.config.get_text_config()
        # About 34 values per token, layer and hidden unit (Korthikanti et al., 2022).
        per_token = 34 * config.num_hidden_layers * config.hidden_size * (4 if self.plan.dtype == "float32" else 2)
        free = (free_bytes("cpu") // self._host_ranks if self.device == "cpu" else free_bytes("cuda")) - missing
        return {
            "layout": self.layout,
            "ranks": self.world_size,
            "free": free,
            "graph_bytes_per_token": per_token,
            "width": config.hidden_size,
        }

    # --- weights
    def save_pretrained(self, folder: Path) -> None:
        """Writes a Hugging Face folder (safetensors) in the compute type, with LoRA a PEFT folder, a value head in a folder
        of its own; a collective.
        """
        head = {} if self.scorer.value_head is None else dict(gathered(list(self.scorer.value_head.named_parameters())))
        if self._adapter:
            adapter = self.adapter_state()
            if torch.distributed.get_rank() == 0:
                save_adapter(self.scorer.lm.lora_config, adapter, folder)
                if head:
                    save_head(head, folder / VALUE_HEAD)
            return
        state = {name: tensor.to("cpu", copy=True) for name, tensor in self.named_weights()}
        if torch.distributed.get_rank() == 0:
            lm = self.scorer.lm
            if lm.config.tie_word_embeddings:
                tied = {n: p for n, p in lm.named_parameters(remove_duplicate=False) if n not in state}
                owners = {id(p): n for n, p in lm.named_parameters()}
                state |= {n: state[owners[id(p)]] for n, p in tied.items()}
            with writing(folder), published(lm):
                lm.save_pretrained(folder, state_dict=state)
            if head:
                save_head(head, folder / VALUE_HEAD)


def _places(side: Tensor, sides: int, critic_type: str | None) -> dict[int, int]:
    """By side that has a value: the index of its first scored token, which the prompt's end predicts (v), or its last (q)."""
    if critic_type is None:
        return {}
    numbered = list(enumerate(side.tolist()))
    found = {s: n for n, s in (numbered if critic_type == "q" else reversed(numbered))}
    return {s: found[s] for s in range(sides) if s in found}


def _beside_engine(
    logprobs: Tensor, side: Tensor, sides: int, sampled: Sequence[Sequence[Sequence[float]]], clip: float | None
) -> tuple[Tensor | None, Tensor]:
    """(ratio of every scored token or None, |log p − log p_engine| of the completions' tokens)."""
    mine = side < sides
    theirs = torch.tensor([x for group in sampled for one in group for x in one], dtype=torch.float64).to(logprobs.device)
    own = logprobs[mine].double()
    if clip is None:
        return None, (own - theirs).abs()
    ratios = torch.ones_like(logprobs)
    ratios[mine] = importance_weights(own, theirs, "truncated", clip).to(ratios)
    return ratios, (own - theirs).abs()
