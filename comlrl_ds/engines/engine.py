"""One model under one DeepSpeed engine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from comlrl_ds.cluster.progress import tick
from comlrl_ds.engines.base import ZeroEngine, gathered
from comlrl_ds.engines.ds_config import EnginePlan
from comlrl_ds.engines.hardware import free_bytes
from comlrl_ds.engines.heads import VALUE_HEAD, save_head
from comlrl_ds.engines.lora import anchored, save_adapter
from comlrl_ds.engines.scorer import Completed, Scorer, completion_logprobs, fit_to_model, inputs_of
from comlrl_ds.maths.advantages import importance_weights
from comlrl_ds.maths.logprobs import parts_for, sum_by_side
from comlrl_ds.maths.packing import Layout, PairTokens, pack, pack_sequences, row_length, share_out

# Largest difference of a token's log-prob between two ways of computing it that the type alone explains.
PROBE_TOLERANCE = {"float32": 1e-3, "bfloat16": 0.5, "float16": 0.1}


@dataclass
class _Graph:
    """The open forward of this rank: its pairs, their token log-probs, whose each of those is, and what it counts beside its
    side's weight; values, and the sides (2 · pair + side) that they are of.
    """

    pairs: list[int]
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
    """

    def __init__(
        self, name: str, lm: Any, plan: EnginePlan, *, layout: str = "auto", chunk: int = 512, host_ranks: int = 1,
        value_head: nn.Module | None = None,
    ) -> None:  # fmt: skip
        self.scorer, self._host_ranks = Scorer(lm, chunk, value_head), host_ranks
        self._graph: _Graph | None = None
        super().__init__(name, self.scorer, lm.config, plan, "lm.")
        try:
            self.layout: Layout = fit_to_model(
                self.scorer,
                lambda batch: self._engine(**inputs_of(batch)),
                layout,
                PROBE_TOLERANCE[plan.dtype],
                self.device,
            )
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from None

    # --- scoring
    def score_pairs(
        self, pairs: Sequence[PairTokens], score_last_token: bool, grad: bool = False
    ) -> tuple[list[list[float]], int]:
        """Summed log-probs of winners and losers; a collective of the group, whose ranks share the pairs out.

        With `grad` this rank's graph stays for `backward`, one at a time.

        Returns:
            [pairs][2], and the padded tokens of all ranks' forwards.
        """
        found = self._score(pairs, score_last_token, grad, [], None, None)
        return found["sums"], found["tokens"]

    def score_samples(
        self, pairs: Sequence[PairTokens], grad: bool, sampled: Sequence[Sequence[Sequence[float]]] = (),
        clip: float | None = None, critic_type: str | None = None,
    ) -> dict[str, Any]:  # fmt: skip
        """Summed log-probs of sampled completions, two of a prompt at a time, every token counted; see `score_pairs`.

        Args:
            sampled: [pairs][2][tokens] log-probs in the engine that sampled them, or nothing.
            clip: tokens learn with the weight min(p / p_engine, clip), p of this forward and a constant; None: with 1.
            critic_type: "v" values the prompts, "q" the completions' ends; None values nothing.

        Returns:
            "sums" [pairs][2], "tokens" as above, "values" [pairs][2] (0 where there is no completion), and "gap": Σ |log p −
            log p_engine| over the tokens whose p_engine is known, and their number.
        """
        return self._score(pairs, True, grad, sampled, clip, critic_type)

    def _score(
        self, pairs: Sequence[PairTokens], score_last_token: bool, grad: bool, sampled: Sequence[Sequence[Sequence[float]]],
        clip: float | None, critic_type: str | None,
    ) -> dict[str, Any]:  # fmt: skip
        if critic_type == "q":
            # A completion's last token is no input of its log-probs, but its value is that of this token: one more follows.
            pairs = [PairTokens(p.prompt, *((*c, 0) if len(c) else () for c in (p.winner, p.loser))) for p in pairs]
        shares = share_out([row_length(p, score_last_token) for p in pairs], self.world_size)
        own = shares[self.rank]
        # At ZeRO-3 every call of a module is a collective, so all ranks call the head as often as the one with most tokens.
        scored = [sum(len(side) for k in share for side in pairs[k].scored(score_last_token)) for share in shares]
        parts = max(parts_for(n, self.scorer.chunk) for n in scored)
        packed = pack([pairs[k] for k in own], layout=self.layout, score_last_token=score_last_token)
        places = _places(packed.side, 2 * len(own), critic_type)
        if critic_type == "q":
            packed.side[list(places.values())] = 2 * len(own)
        batch = packed.to(self.device)
        extra: dict[str, Any] = {}
        if critic_type is not None:
            extra = {"valued": torch.tensor(list(places.values()) or [0], device=self.device)}
        with torch.set_grad_enabled(grad):
            found = self._engine(**inputs_of(batch), parts=parts, **extra)
        logprobs, values = (found, None) if critic_type is None else found
        whole = torch.zeros(4 * len(pairs) + 3, dtype=torch.float64, device=self.device)
        sums = sum_by_side(logprobs.detach(), batch.side, len(own) + 1)[: len(own)]
        whole[: 2 * len(pairs)].view(-1, 2)[own] = sums.double()
        if values is not None and places:
            at = torch.tensor([2 * own[s // 2] + s % 2 for s in places], device=self.device)
            whole[2 * len(pairs) :][at] = values.detach().double()
        ratios = None
        if len(sampled):
            ratios, gaps = _beside_engine(logprobs.detach(), batch.side, [sampled[k] for k in own], clip)
            whole[-3], whole[-2] = gaps.sum(), len(gaps)
        whole[-1] = packed.padded_tokens
        if grad:
            self._graph = _Graph(own, logprobs, batch.side, ratios, values, list(places))
        if self.world_size > 1:
            torch.distributed.all_reduce(whole)  # every pair is one rank's, so this adds zeros: exact
        tick()
        sides = whole[:-3].view(2, -1, 2).tolist()
        return {"sums": sides[0], "values": sides[1], "gap": [float(whole[-3]), int(whole[-2])], "tokens": int(whole[-1])}

    def values(self, rows: Sequence[Sequence[int]]) -> list[float]:
        """The value head's value of each row of token ids, at its last token; a collective of the group."""
        found = self._score([PairTokens(row, (0,), ()) for row in rows], True, False, [], None, "v")
        return [value for value, _ in found["values"]]

    @torch.no_grad()
    def token_logprobs(self, rows: Sequence[Sequence[int]]) -> list[list[float]]:
        """log p of every token of a row but its first."""
        batch = pack_sequences(rows).to(self.device)
        scores = self._engine(**inputs_of(batch))
        return [scores[batch.side == 2 * k].tolist() for k in range(len(rows))]

    def completion_logprobs(self, rows: Sequence[Completed]) -> list[list[float]]:
        """log p of every token of each completion; a collective of the group, whose ranks share the rows out."""
        return completion_logprobs(self._engine, self.scorer.chunk, rows, self.rank, self.world_size, self.device)

    def anchor_logprobs(self, rows: Sequence[Completed]) -> list[list[float]]:
        """The same by the policy as it was at first: with LoRA that is this model without what it has learned."""
        with anchored(self.scorer):
            return self.completion_logprobs(rows)

    # --- learning
    def backward(self, weights: Sequence[Sequence[float]], value_weights: Sequence[Sequence[float]] = ()) -> None:
        """Gradient of Σ weights · log-probs + Σ value_weights · values over the pairs that were scored last, added to the
        step's.

        One backward per forward: at ZeRO-3 two open forwards with two backwards give silently wrong gradients.

        Args:
            weights, value_weights: [pairs][2], ∂loss/∂log-prob and ∂loss/∂value over the whole batch of the step.
        """
        graph, self._graph = self._graph, None
        assert graph
        own = torch.tensor([weights[k] for k in graph.pairs] + [(0.0, 0.0)], dtype=torch.float64)  # last: of padding
        per_token = own.flatten()[graph.side.to("cpu")].to(graph.logprobs)
        if graph.ratios is not None:
            per_token = per_token * graph.ratios
        total = (graph.logprobs * per_token).sum()
        if graph.values is not None:
            of = [value_weights[graph.pairs[s // 2]][s % 2] for s in graph.valued] or [0.0]
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
            use_cache, lm.config.use_cache = lm.config.use_cache, True
            lm.save_pretrained(folder, state_dict=state)
            lm.config.use_cache = use_cache
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
    logprobs: Tensor, side: Tensor, sampled: Sequence[Sequence[Sequence[float]]], clip: float | None
) -> tuple[Tensor | None, Tensor]:
    """(ratio of every scored token or None, |log p − log p_engine| of the completions' tokens)."""
    mine = side < 2 * len(sampled)
    theirs = torch.tensor([x for pair in sampled for one in pair for x in one], dtype=torch.float64).to(logprobs.device)
    own = logprobs[mine].double()
    if clip is None:
        return None, (own - theirs).abs()
    ratios = torch.ones_like(logprobs)
    ratios[mine] = importance_weights(own, theirs, "truncated", clip).to(ratios)
    return ratios, (own - theirs).abs()
