"""One model under one DeepSpeed engine."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from comlrl_ds.cluster.progress import tick
from comlrl_ds.engines.boundary import StepBoundary
from comlrl_ds.engines.ds_config import EnginePlan, fill_hidden_size
from comlrl_ds.engines.hardware import free_bytes
from comlrl_ds.engines.scorer import Scorer, fit_to_model, inputs_of
from comlrl_ds.maths.logprobs import parts_for, sum_by_side
from comlrl_ds.maths.packing import Layout, PairTokens, pack, pack_sequences, row_length, share_out

# Largest difference of a token's log-prob between two ways of computing it that the type alone explains.
PROBE_TOLERANCE = {"float32": 1e-3, "bfloat16": 0.5, "float16": 0.1}
GATHER_BYTES = 64 << 20


@dataclass
class _Graph:
    """The open forward of this rank: its pairs, their token log-probs, and whose each of those is."""

    pairs: list[int]
    logprobs: Tensor
    side: Tensor


class PolicyEngine:
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
        import deepspeed

        self.name, self.plan, self._host_ranks = name, plan, host_ranks
        self.scorer = Scorer(lm, chunk)
        self.version = 0
        fill_hidden_size(plan.config, lm.config.get_text_config().hidden_size)
        optimizer, from_file = build_optimizer(self.scorer.parameters(), plan)
        config = plan.config | ({"optimizer": plan.optimizer} if from_file else {})
        self._engine, *_ = deepspeed.initialize(
            model=self.scorer, optimizer=optimizer, model_parameters=list(self.scorer.parameters()), config=config
        )
        self._open_step = False
        self._graph: _Graph | None = None
        self._boundary = StepBoundary(self._engine, plan.stage)
        self.device = str(self._engine.device)
        self.world_size = int(self._engine.dp_world_size)
        self.rank = torch.distributed.get_rank()
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
        # DeepSpeed averages over the group's ranks; every rank holds a part of the sum.
        self._engine.backward((graph.logprobs * per_token).sum() * self.world_size)
        self._open_step = True
        tick()

    def learn_pairs(self, pairs: Sequence[PairTokens], score_last_token: bool, weights: Sequence[Sequence[float]]) -> int:
        """Scores pairs and learns from them in one go; returns the padded tokens."""
        _, tokens = self.score_pairs(pairs, score_last_token, grad=True)
        self.backward(weights)
        return tokens

    def gradient_norm(self) -> float:
        """L2 norm of the step's gradient before clipping; infinite if any of it is NaN or infinite."""
        return self._boundary.norm()

    def step(self) -> None:
        """Clips, updates the fp32 masters and the compute weights, and advances the learning rate."""
        self._boundary.apply()
        self._open_step = False
        self.version += 1

    def discard(self) -> None:
        """Drops the step's gradient; weights, optimizer and learning rate stay as they were."""
        self._graph = None
        if self._open_step:  # without any backward there is nothing to drop, and DeepSpeed has no buffers to end a step with
            self._boundary.skip()
        self._open_step = False

    @property
    def deepspeed(self) -> Any:
        """The DeepSpeed engine."""
        return self._engine

    def start_schedule(self, total_steps: int) -> None:
        """Builds the learning-rate schedule of the DeepSpeed file, now that the number of steps is known."""
        scheduler = self.plan.scheduler
        if scheduler is None:
            return
        from deepspeed.runtime import lr_schedules

        kind = getattr(lr_schedules, scheduler["type"], None) or getattr(torch.optim.lr_scheduler, scheduler["type"], None)
        if kind is None:
            raise ValueError(f"deepspeed.scheduler.type: unknown schedule {scheduler['type']!r}")
        known = {
            "total_num_steps": total_steps,
            "warmup_max_lr": self.plan.optimizer["params"]["lr"],
            "warmup_min_lr": 0.0,
        }
        params = {k: known.get(k, v) if v == "auto" else v for k, v in scheduler["params"].items()}
        if params.get("warmup_num_steps") == "auto":
            params["warmup_num_steps"] = max(1, round(0.1 * total_steps))
        if unknown := [k for k, v in params.items() if v == "auto"]:
            raise ValueError(f"deepspeed.scheduler.params.{unknown[0]}: 'auto' is not known here; write a value")
        self._engine.lr_scheduler = kind(self._engine.optimizer, **params)

    def learning_rate(self) -> float:
        """Of the next step."""
        return float(self._engine.optimizer.param_groups[0]["lr"])

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

    # --- room for others on a shared device
    def put_away(self) -> None:
        """Moves optimizer states and fp32 masters to the host. At ZeRO-3 DeepSpeed can do so only with an optimizer of its own
        that needs a CUDA compiler; there they stay, and the rollout engine's share of the device must leave room for them.
        """
        if self._movable():
            from deepspeed.runtime.zero.offload_config import OffloadStateTypeEnum as State

            self._engine.offload_states(include=[State.optim_states, State.hp_params, State.contiguous_grad_buffer])

    def take_back(self) -> None:
        """Undoes `put_away`."""
        if self._movable():
            self._engine.reload_states()

    def _movable(self) -> bool:
        return self.plan.stage < 3 and hasattr(self._engine.optimizer, "offload_states")

    # --- weights
    def named_weights(self, dtype: torch.dtype | None = None) -> Iterator[tuple[str, Tensor]]:
        """(Hugging Face name, whole tensor) of every parameter, a tied head once, gathered in groups; a collective.

        A group is gathered and released before any of it is handed on: a consumer that waits inside a gather would
        make the ranks drift apart.
        """
        if self.plan.stage == 3:
            # A forward without its backward leaves gathers in flight that DeepSpeed began for that backward.
            self._engine.optimizer.parameter_offload.partition_all_parameters()
        group: list[tuple[str, Any]] = []
        size = 0
        for name, p in self.scorer.named_parameters():
            group.append((name.removeprefix("lm."), p))
            size += getattr(p, "ds_numel", p.numel()) * p.element_size()
            if size >= GATHER_BYTES:
                yield from _gathered(group, dtype)
                group, size = [], 0
        yield from _gathered(group, dtype)

    def weight_shapes(self) -> list[tuple[str, tuple[int, ...]]]:
        """(Hugging Face name, whole shape) of what `named_weights` gives, in its order."""
        named = self.scorer.named_parameters()
        return [(name.removeprefix("lm."), tuple(getattr(p, "ds_shape", p.shape))) for name, p in named]

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


def _gathered(group: list[tuple[str, Any]], dtype: torch.dtype | None) -> list[tuple[str, Tensor]]:
    sharded = [p for _, p in group if hasattr(p, "ds_id")]
    if not sharded:
        return [(n, p.detach() if dtype is None else p.detach().to(dtype)) for n, p in group]
    from deepspeed.runtime.zero import GatheredParameters

    tick()
    with GatheredParameters(sharded):
        return [(n, p.detach().to(dtype or p.dtype, copy=True)) for n, p in group]


def build_optimizer(parameters: Any, plan: EnginePlan) -> tuple[torch.optim.Optimizer | None, bool]:
    """(optimizer, whether DeepSpeed builds it from the file instead).

    torch's fused AdamW needs no C++ build and is several times faster on a CPU than its unfused form.
    """
    kind, params = plan.optimizer["type"].lower(), dict(plan.optimizer["params"])
    for name in ("torch_adam", "adam_w_mode"):
        params.pop(name, None)
    if kind in ("adam", "adamw"):
        # DeepSpeed's "Adam" is AdamW unless adam_w_mode is false.
        decoupled = kind == "adamw" or plan.optimizer["params"].get("adam_w_mode", True)
        params["betas"] = tuple(params.get("betas", (0.9, 0.999)))
        offload = plan.config["zero_optimization"].get("offload_optimizer", {}).get("device", "none") != "none"
        if offload:
            plan.config.setdefault("zero_force_ds_cpu_optimizer", False)
        made = torch.optim.AdamW if decoupled else torch.optim.Adam
        return made(parameters, fused=True, **params), False
    if kind == "sgd":
        return torch.optim.SGD(parameters, **params), False
    return None, True
