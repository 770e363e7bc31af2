"""A policy that never learns: the anchor of a KL."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch

from comlrl_ds.cluster.progress import tick
from comlrl_ds.engines.ds_config import EnginePlan, fill_hidden_size
from comlrl_ds.engines.scorer import Scorer, completion_logprobs, fit_engine
from comlrl_ds.maths.packing import Completions, Layout


class FrozenEngine:
    """Log-probs of a model as it was loaded. Sharded over its group's ranks where the plan's stage is 3, else whole on each:
    a model without gradients and optimizer has nothing else to shard.

    Args:
        name: e.g. "reference.0". lm: a transformers causal LM in the plan's compute type. layout, chunk: see `PolicyEngine`.
        device: of this rank.
    """

    def __init__(self, name: str, lm: Any, plan: EnginePlan, *, layout: str = "auto", chunk: int, device: str) -> None:
        self.name, self.scorer = name, Scorer(lm, chunk).requires_grad_(False).eval()
        self.rank, self.world_size = torch.distributed.get_rank(), torch.distributed.get_world_size()
        self._forward: Any = self.scorer
        self.device = device
        if plan.stage == 3 and self.world_size > 1:
            import deepspeed

            config = copy.deepcopy(plan.config)
            fill_hidden_size(config, lm.config.get_text_config().hidden_size)
            self._forward, *_ = deepspeed.initialize(model=self.scorer, config=config)
            self.device = str(self._forward.device)
        else:
            self.scorer.to(device)
        # As an actor does: a KL between two ways of reading the same logits would not be 0 where policies are equal.
        self.layout: Layout = fit_engine(name, self.scorer, self._forward, layout, plan.dtype, self.device)

    def completion_logprobs(self, groups: Sequence[Completions]) -> list[list[list[float]]]:
        """log p of every token of each completion; a collective of the group, whose ranks share the prompts out."""
        found = completion_logprobs(
            self._forward, self.scorer.chunk, groups, self.layout, self.rank, self.world_size, self.device
        )
        tick()
        return found
