"""A language model's backbone with a scalar head: reward models and critics, and their DeepSpeed engine."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from comlrl_ds.cluster.progress import tick
from comlrl_ds.config.lora import LoraSettings
from comlrl_ds.engines.base import ZeroEngine, gathered
from comlrl_ds.engines.dropout import check_silenced, masks_of, published, still
from comlrl_ds.engines.ds_config import EnginePlan
from comlrl_ds.engines.heads import load_head, make_head, save_head
from comlrl_ds.engines.loading import adapted_base, load_backbone
from comlrl_ds.engines.lora import add_lora, save_adapter
from comlrl_ds.maths.packing import share_out
from comlrl_ds.rollout.adapters import is_adapter
from comlrl_ds.runs.failure import writing


class ScalarModel(nn.Module):
    """value = w·z + b, z the backbone's last hidden state at a row's last token; with `hidden_dim` w·tanh(A z + a) + b.

    The backbone is a causal LM without its vocabulary head, so a row's value does not depend on padding after it.

    Args:
        backbone: a transformers model that gives hidden states. head_seed: of the head's first values.
        hidden_dim: width of a layer before the head; None: none. freeze_backbone: only the head learns.
    """

    def __init__(
        self, backbone: Any, *, head_seed: int, hidden_dim: int | None = None,
        freeze_backbone: bool = False,
    ) -> None:  # fmt: skip
        super().__init__()
        self.backbone = backbone
        width, dtype = backbone.config.get_text_config().hidden_size, next(backbone.parameters()).dtype
        self.head = make_head(width, head_seed, hidden_dim).to(dtype)
        if freeze_backbone:
            backbone.requires_grad_(False)

    def forward(self, ids: Tensor, positions: Tensor, at: Tensor) -> Tensor:
        """[rows] values in fp32.

        Args:
            ids, positions: [rows, width], padded on the right. at: [rows] flat index of each row's last token.
        """
        hidden = self.backbone(input_ids=ids, position_ids=positions, use_cache=False)[0].flatten(0, 1)[at]
        return self.head(hidden).squeeze(-1).float()


def save_scalar(model: ScalarModel, folder: Path, backbone: dict[str, Tensor], head: dict[str, Tensor]) -> None:
    """Writes a Hugging Face folder of the backbone, and its head beside it."""
    folder.mkdir(parents=True, exist_ok=True)
    with writing(folder), published(model.backbone):
        model.backbone.save_pretrained(folder, state_dict=backbone)
        save_head(head, folder)


class JointRewardModel(ScalarModel):
    """R(h, a) of one text that holds every agent's prompt and response; see `comlrl_ds.preference.joint_text`."""

    @classmethod
    def from_pretrained(cls, source: str, *, dtype: str = "float32", attn_implementation: str | None = "sdpa") -> Any:
        """A saved reward model, with its head.

        Raises:
            ConfigError: the folder has no head.
        """
        base = adapted_base(source, "reward model") if is_adapter(source) else source
        backbone = load_backbone(base, dtype=dtype, attn_implementation=attn_implementation, dropout=False)
        if base != source:
            add_lora(backbone, LoraSettings(adapter=source), source=base, seed=0, dropout=False)
        model = cls(backbone, head_seed=0)
        load_head(Path(source), model.head)
        return model


class ScalarEngine(ZeroEngine):
    """A reward model or critic under DeepSpeed.

    A step is any number of (`values` with grad, `backward`), then `step` or `discard`.

    Args:
        model: in the plan's compute type. dropout_seed: of the masks of the forwards with grad; None: it has no dropout.
    """

    def __init__(self, name: str, model: ScalarModel, plan: EnginePlan, dropout_seed: int | None = None) -> None:
        self.model, self._dropout_seed = model, dropout_seed
        self._graph: tuple[list[int], Tensor] | None = None
        super().__init__(name, model, model.backbone.config, plan, "")
        probe = torch.arange(1, 9, device=self.device)[None]
        inputs = {"ids": probe, "positions": probe - 1, "at": torch.tensor([7], device=self.device)}
        try:
            check_silenced(model.backbone, lambda: self._engine(**inputs), self.device)
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from None

    def values(self, rows: Sequence[Sequence[int]], grad: bool = False) -> list[float]:
        """A value for each row of token ids; a collective, whose ranks share the rows out by length.

        With `grad` this rank's graph stays for `backward`, one at a time. Without it dropout is off.
        """
        shares = share_out([len(row) for row in rows], self.world_size)
        own = shares[self.rank]
        batch = [rows[k] for k in own] or [(0,)]  # every rank runs the same forwards
        width = max(map(len, batch))
        ids = torch.zeros(len(batch), width, dtype=torch.long)
        for k, row in enumerate(batch):
            ids[k, : len(row)] = torch.as_tensor(row, dtype=torch.long)
        positions = torch.arange(width).repeat(len(batch), 1)
        at = torch.tensor([k * width + len(row) - 1 for k, row in enumerate(batch)])
        inputs = {"ids": ids.to(self.device), "positions": positions.to(self.device), "at": at.to(self.device)}
        masks = masks_of(self._dropout_seed, self.rank, self.version, {**inputs}, self.device) if grad else still(self.model)
        with torch.set_grad_enabled(grad), masks:
            found = self._engine(**inputs)
        if grad:
            self._graph = (own, found)
        whole = torch.zeros(len(rows), dtype=torch.float64, device=self.device)
        if own:
            whole[own] = found.detach().double()
        if self.world_size > 1:
            torch.distributed.all_reduce(whole)  # every row is one rank's: this adds zeros
        tick()
        return whole.tolist()

    def backward(self, weights: Sequence[float]) -> None:
        """Gradient of Σ weights · values over the rows that were valued last, added to the step's.

        Args:
            weights: [rows], ∂loss/∂value over the whole batch of the step.
        """
        graph, self._graph = self._graph, None
        assert graph
        own, found = graph
        mine = torch.tensor([weights[k] for k in own] or [0.0], dtype=found.dtype, device=found.device)
        self._learn((found * mine).sum())

    def _drop_graph(self) -> None:
        self._graph = None

    def save_pretrained(self, folder: Path) -> None:
        """Writes the backbone as a Hugging Face folder, with LoRA as a PEFT folder, and its head beside it; a collective."""
        if self.learns_adapter:
            adapter, head = self.adapter_state(), dict(gathered(list(self.model.head.named_parameters())))
            if torch.distributed.get_rank() == 0:
                save_adapter(
                    self.model.backbone.lora_config, {n.removeprefix("backbone."): t for n, t in adapter.items()}, folder
                )
                save_head(head, folder)
            return
        state = {name: tensor.to("cpu", copy=True) for name, tensor in self.named_weights()}
        if torch.distributed.get_rank() == 0:
            parts = {
                prefix: {n.removeprefix(prefix): t for n, t in state.items() if n.startswith(prefix)}
                for prefix in ("backbone.", "head.")
            }
            save_scalar(self.model, folder, parts["backbone."], parts["head."])
