"""What every model under a DeepSpeed engine has: steps, schedules, its weights, and room for others."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from comlrl_ds.cluster.progress import tick
from comlrl_ds.engines.boundary import StepBoundary
from comlrl_ds.engines.ds_config import EnginePlan, fill_hidden_size
from comlrl_ds.engines.lora import AdapterLayer, adapter_layers
from comlrl_ds.rollout.adapters import wire

GATHER_BYTES = 64 << 20


class ZeroEngine:
    """One module under one DeepSpeed engine. Every method but `learning_rate` and `weight_shapes` is a collective of the ranks
    of its device group, each of which holds an engine of this name.

    Args:
        name: e.g. "actor.0", for messages and files.
        module: what DeepSpeed trains. config: of the transformers model in it. plan: from `plan_engine`.
        prefix: before the Hugging Face names of the model's parameters in the module.
    """

    def __init__(self, name: str, module: nn.Module, config: Any, plan: EnginePlan, prefix: str) -> None:
        import deepspeed

        self.name, self.plan, self._module, self._prefix = name, plan, module, prefix
        self.version = 0
        fill_hidden_size(plan.config, config.get_text_config().hidden_size)
        self._adapter = adapter_layers(module, prefix)
        trained = [p for p in module.parameters() if p.requires_grad]
        optimizer, from_file = build_optimizer(trained, plan)
        settings = plan.config | ({"optimizer": plan.optimizer} if from_file else {})
        self._engine, *_ = deepspeed.initialize(model=module, optimizer=optimizer, model_parameters=trained, config=settings)
        self._open_step = False
        self._boundary = StepBoundary(self._engine, plan.stage)
        self.device = str(self._engine.device)
        self.world_size = int(self._engine.dp_world_size)
        self.rank = torch.distributed.get_rank()

    # --- steps
    def _learn(self, weighted_sum: Tensor) -> None:
        """Adds the gradient of a sum, of which this rank holds a part, to the step's."""
        # DeepSpeed averages over the group's ranks.
        self._engine.backward(weighted_sum * self.world_size)
        self._open_step = True
        tick()

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
        self._drop_graph()
        if self._open_step:  # without any backward there is nothing to drop, and DeepSpeed has no buffers to end a step with
            self._boundary.skip()
        self._open_step = False

    def _drop_graph(self) -> None:
        """Forgets an open forward."""

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
        if self._adapter:
            yield from self._adapter_weights()
            return
        group: list[tuple[str, Any]] = []
        size = 0
        for name, p in self._published():
            group.append((name.removeprefix(self._prefix), p))
            size += getattr(p, "ds_numel", p.numel()) * p.element_size()
            if size >= GATHER_BYTES:
                yield from gathered(group, dtype)
                group, size = [], 0
        yield from gathered(group, dtype)

    def _adapter_weights(self) -> Iterator[tuple[str, Tensor]]:
        """The adapter as it is sent (`rollout.adapters`), in the compute type."""
        group: list[AdapterLayer] = []
        size = 0
        for layer in self._adapter:
            group.append(layer)
            size += sum(getattr(p, "ds_numel", p.numel()) * p.element_size() for p in (layer.a, layer.b))
            if size >= GATHER_BYTES:
                yield from _sent(group)
                group, size = [], 0
        yield from _sent(group)

    @property
    def dtype(self) -> str:
        """The compute type."""
        return self.plan.dtype

    @property
    def learns_adapter(self) -> bool:
        """Whether it is an adapter that learns, beside a base that stays."""
        return bool(self._adapter)

    def adapter_state(self) -> dict[str, Tensor]:
        """The adapter by peft's names, whole, on the host; a collective."""
        named = [(f"{x.name}.lora_{part}.weight", p) for x in self._adapter for part, p in (("A", x.a), ("B", x.b))]
        return {name: tensor.to("cpu", copy=True) for name, tensor in gathered(named)} if named else {}

    def weight_shapes(self) -> list[tuple[str, tuple[int, ...]]]:
        """(Hugging Face name, whole shape) of what `named_weights` gives, in its order."""
        return [(name.removeprefix(self._prefix), tuple(getattr(p, "ds_shape", p.shape))) for name, p in self._published()]

    def _published(self) -> Iterator[tuple[str, Any]]:
        """The parameters of the transformers model; what stands beside it, a value head for one, is nobody else's."""
        return ((name, p) for name, p in self._module.named_parameters() if name.startswith(self._prefix))


def gathered(group: list[tuple[str, Any]], dtype: torch.dtype | None = None) -> list[tuple[str, Tensor]]:
    """Whole tensors of named parameters, sharded or not; a collective where they are."""
    sharded = [p for _, p in group if hasattr(p, "ds_id")]
    if not sharded:
        return [(n, p.detach() if dtype is None else p.detach().to(dtype)) for n, p in group]
    from deepspeed.runtime.zero import GatheredParameters

    tick()
    with GatheredParameters(sharded):
        return [(n, p.detach().to(dtype or p.dtype, copy=True)) for n, p in group]


def _sent(group: list[AdapterLayer]) -> Iterator[tuple[str, Tensor]]:
    if not group:
        return
    whole = dict(gathered([(f"{x.name} {part}", p) for x in group for part, p in (("A", x.a), ("B", x.b))]))
    for x in group:
        yield from wire(x.name, whole[f"{x.name} A"], whole[f"{x.name} B"], x.scaling, x.transposed)


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
