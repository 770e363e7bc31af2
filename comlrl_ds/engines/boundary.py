"""The end of a DeepSpeed step in two parts, so that no agent steps before every agent's gradient is known to be finite.

`engine.step()` reduces what the backwards left, checks, clips and applies in one go. Here the reduction comes first
(`norm`), then either `apply` or `skip`. Only this file touches the optimizers' own methods.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch


class StepBoundary:
    """Args: engine, a DeepSpeed engine with `managed_gradient_accumulation` off at ZeRO stage 1, 2 or 3."""

    def __init__(self, engine: Any, stage: int) -> None:
        self._engine, self._stage = engine, stage
        self._reduced = False

    def norm(self) -> float:
        """L2 norm of the step's gradient over the group, unclipped; infinite if any of it is NaN or infinite."""
        self._reduce()
        optimizer = self._engine.optimizer
        if self._stage == 3:
            from deepspeed.runtime.utils import combine_grad_norm_groups

            norm = combine_grad_norm_groups(optimizer._get_norm_groups())
        elif self._separate_masters():
            from deepspeed.runtime.utils import get_global_norm_of_tensors

            tensors, _experts = optimizer.get_grads_for_norm()
            norm = get_global_norm_of_tensors(input_tensors=tensors, mpu=optimizer.mpu, norm_type=optimizer.norm_type)
        else:
            norm = optimizer.scaled_global_norm()
        value = float(norm) / float(getattr(optimizer, "loss_scale", 1.0))
        return value if math.isfinite(value) and value >= 0 else math.inf

    def apply(self) -> None:
        """Clips and updates."""
        with self._already_reduced():
            self._engine.step()
        if not self._engine.was_step_applied():
            raise FloatingPointError("DeepSpeed skipped a step whose gradient was finite")

    def skip(self) -> None:
        """Drops the step's gradient; weights, optimizer state and learning rate stay.

        DeepSpeed skips a step whose norm is invalid, and clears every buffer that its stage keeps: so it is shown one.
        """
        infinite = torch.tensor(math.inf, device=self._engine.device)
        shown: Callable[..., Any]
        if self._stage == 3:
            name, shown = "_get_norm_groups", lambda: [infinite]
        elif self._separate_masters():
            name, shown = "get_grads_for_norm", lambda for_clipping=False: ([infinite], {})
        else:
            name, shown = "scaled_global_norm", lambda norm_type=2: infinite
        with self._already_reduced(), _replaced(self._engine.optimizer, name, shown):
            self._engine.step()
        if self._engine.was_step_applied():
            raise FloatingPointError("DeepSpeed applied a step that was to be skipped")

    def _separate_masters(self) -> bool:
        """Stage 1 in bf16 with fp32 gradients runs on another optimizer class than the other cases of stages 1 and 2."""
        return not hasattr(self._engine.optimizer, "scaled_global_norm")

    def _reduce(self) -> None:
        """What `engine.step()` does first, done once."""
        if self._reduced:
            return
        engine = self._engine
        if self._stage >= 2:
            engine.optimizer.finalize_gradient_accumulation_boundary()
        else:
            engine._running_engine_step = True  # otherwise only inside step() is a boundary
            engine.allreduce_gradients()
            engine._running_engine_step = False
        self._reduced = True

    @contextmanager
    def _already_reduced(self) -> Iterator[None]:
        if not self._reduced:
            yield
        elif self._stage >= 2:
            with _replaced(self._engine.optimizer, "finalize_gradient_accumulation_boundary", lambda: None):
                yield
        else:
            with _replaced(self._engine, "enable_backward_allreduce", False):
                yield
        self._reduced = False


@contextmanager
def _replaced(owner: Any, name: str, value: Callable[..., Any] | bool) -> Iterator[None]:
    """An instance attribute for the length of a block."""
    own = vars(owner)
    had, old = name in own, own.get(name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        if had:
            setattr(owner, name, old)
        else:
            delattr(owner, name)
