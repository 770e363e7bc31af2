"""One model under one DeepSpeed engine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from comlrl_ds.cluster.progress import tick
from comlrl_ds.engines.base import ZeroEngine
from comlrl_ds.engines.ds_config import EnginePlan
from comlrl_ds.engines.hardware import free_bytes
from comlrl_ds.engines.scorer import Completed, Scorer, completion_logprobs, fit_to_model, inputs_of
from comlrl_ds.maths.logprobs import parts_for, sum_by_side
from comlrl_ds.maths.packing import Layout, PairTokens, pack, pack_sequences, row_length, share_out

# Largest difference of a token's log-prob between two ways of computing it that the type alone explains.
PROBE_TOLERANCE = {"float32": 1e-3, "bfloat16": 0.5, "float16": 0.1}


@dataclass
class _Graph:
    """The open forward of this rank: its pairs, their token log-probs, and whose each of those is."""

    pairs: list[int]
    logprobs: Tensor
    side: Tensor


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
    """

    def __init__(
        self, name: str, lm: Any, plan: EnginePlan, *, layout: str = "auto", chunk: int = 512, host_ranks: int = 1
    ) -> None:
        self.scorer, self._host_ranks = Scorer(lm, chunk), host_ranks
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
        shares = share_out([row_length(p, score_last_token) for p in pairs], self.world_size)
        own = shares[self.rank]
        # At ZeRO-3 every call of a module is a collective, so all ranks call the head as often as the one with most tokens.
        scored = [sum(len(side) for k in share for side in pairs[k].scored(score_last_token)) for share in shares]
        parts = max(parts_for(n, self.scorer.chunk) for n in scored)
        packed = pack([pairs[k] for k in own], layout=self.layout, score_last_token=score_last_token)
        batch = packed.to(self.device)
        with torch.set_grad_enabled(grad):
            logprobs = self._engine(**inputs_of(batch), parts=parts)
        if grad:
            self._graph = _Graph(own, logprobs, batch.side)
        whole = torch.zeros(2 * len(pairs) + 1, dtype=torch.float64, device=self.device)
        sums = sum_by_side(logprobs.detach(), batch.side, len(own) + 1)[: len(own)]
        whole[:-1].view(-1, 2)[own] = sums.double()
        whole[-1] = packed.padded_tokens
        if self.world_size > 1:
            torch.distributed.all_reduce(whole)  # every pair is one rank's, so this adds zeros: exact
        tick()
        return whole[:-1].view(-1, 2).tolist(), int(whole[-1])

    @torch.no_grad()
    def token_logprobs(self, rows: Sequence[Sequence[int]]) -> list[list[float]]:
        """log p of every token of a row but its first."""
        batch = pack_sequences(rows).to(self.device)
        scores = self._engine(**inputs_of(batch))
        return [scores[batch.side == 2 * k].tolist() for k in range(len(rows))]

    def completion_logprobs(self, rows: Sequence[Completed]) -> list[list[float]]:
        """log p of every token of each completion; a collective of the group, whose ranks share the rows out."""
        return completion_logprobs(self._engine, self.scorer.chunk, rows, self.rank, self.world_size, self.device)

    # --- learning
    def backward(self, weights: Sequence[Sequence[float]]) -> None:
        """Gradient of Σ weights · log-probs over the pairs that were scored last, added to the step's.

        One backward per forward: at ZeRO-3 two open forwards with two backwards give silently wrong gradients.

        Args:
            weights: [pairs][2], ∂loss/∂log-prob over the whole batch of the step.
        """
        graph, self._graph = self._graph, None
        assert graph
        own = torch.tensor([weights[k] for k in graph.pairs] + [(0.0, 0.0)], dtype=torch.float64)  # last: of padding
        per_token = own.flatten()[graph.side.to("cpu")].to(graph.logprobs)
        self._learn((graph.logprobs * per_token).sum())

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
        elements = sum(getattr(p, "ds_numel", p.numel()) for p in self.scorer.parameters())
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
        """Writes a Hugging Face folder (safetensors) in the compute type; a collective."""
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
