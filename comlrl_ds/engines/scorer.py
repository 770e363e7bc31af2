"""A causal language model as a scorer: micro-batch in, log-probabilities of its target tokens out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from comlrl_ds.engines.dropout import check_silenced, still
from comlrl_ds.maths.logprobs import additive_mask, parts_for, token_logprobs
from comlrl_ds.maths.packing import Completions, Layout, MicroBatch, pack, row_length, share_out

# Largest difference of a token's log-prob between two ways of computing it that the type alone explains.
PROBE_TOLERANCE = {"float32": 1e-3, "bfloat16": 0.5, "float16": 0.1}


class Scorer(nn.Module):
    """Wraps a transformers causal LM.

    Only the positions that predict a scored token reach the vocabulary projection, `chunk` at a time. Models whose
    logits are more than head(hidden state) are scored through their own whole forward (`whole_logits`).

    Args:
        value_head: [n, d] → [n, 1], in the model's type; values the same hidden states. None: no values.
    """

    def __init__(self, lm: Any, chunk: int = 512, value_head: nn.Module | None = None) -> None:
        super().__init__()
        self.lm = lm
        self.chunk = chunk
        self.value_head = value_head
        self.whole_logits = False

    def forward(
        self, ids: Tensor, positions: Tensor, visible: Tensor | None, at: Tensor, target: Tensor, parts: int = 1,
        valued: Tensor | None = None,
    ) -> Tensor | tuple[Tensor, Tensor]:  # fmt: skip
        """[N] log-probabilities; the arguments are `MicroBatch`'s, and the least number of calls of the head.

        With `valued`, [K] of the N positions, also [K] values in fp32.
        """
        inputs: dict[str, Any] = {"input_ids": ids, "position_ids": positions, "use_cache": False}
        if visible is not None:
            inputs["attention_mask"] = additive_mask(visible, self.lm.get_output_embeddings().weight.dtype)
        if self.whole_logits:
            found = self.lm(**inputs, output_hidden_states=valued is not None)
            hidden = found.hidden_states[-1].flatten(0, 1)[at] if valued is not None else None
            scores = token_logprobs(found.logits.flatten(0, 1)[at], target, lambda z: z, self.chunk, parts)
        else:
            hidden = self.lm.base_model(**inputs)[0].flatten(0, 1)[at]
            scores = token_logprobs(hidden, target, self._head, self.chunk, parts)
        if valued is None:
            return scores
        assert self.value_head is not None and hidden is not None
        return scores, self.value_head(hidden[valued]).squeeze(-1).float()

    def _head(self, hidden: Tensor) -> Tensor:
        logits = self.lm.get_output_embeddings()(hidden)
        config = self.lm.config
        if (scaling := getattr(config, "logits_scaling", None)) is not None:  # Granite
            logits = logits / scaling
        if (scale := getattr(config, "logit_scale", None)) is not None:  # Cohere
            logits = logits * scale
        if (cap := getattr(config, "final_logit_softcapping", None)) is not None:  # Gemma 2 and 3
            logits = torch.tanh(logits / cap) * cap
        return logits


def inputs_of(batch: MicroBatch) -> dict[str, Tensor | None]:
    """The scorer's arguments."""
    return {name: getattr(batch, name) for name in ("ids", "positions", "visible", "at", "target")}


@torch.no_grad()
def completion_logprobs(
    forward: Any, chunk: int, groups: Sequence[Completions], layout: Layout, rank: int, ranks: int, device: str
) -> list[list[list[float]]]:
    """log p of every token of each completion, [groups][completions][tokens], shared out over a group's ranks: all get all.

    Args:
        forward: the scorer, or the engine around it. chunk: tokens that reach the vocabulary at once.
        layout: as the model takes it (`fit_to_model`).
    """
    sizes = [[len(c) for c in completions] for _, completions in groups]
    totals = [sum(of_group) for of_group in sizes]
    shares = share_out([row_length(g) for g in groups], ranks)
    own = shares[rank]
    # At ZeRO-3 every call of a module is a collective, so all ranks call the head as often as the one with most tokens.
    parts = max(parts_for(sum(totals[k] for k in share), chunk) for share in shares)
    batch = pack([groups[k] for k in own], layout).to(device)
    found = forward(**inputs_of(batch), parts=parts).double()
    whole = torch.zeros(sum(totals), dtype=torch.float64, device=device)
    parts_of = whole.split(totals)
    # Tokens are in the order of groups and completions; what follows them is padding.
    for k, values in zip(own, found[: sum(totals[k] for k in own)].split([totals[k] for k in own])):
        parts_of[k].copy_(values)
    if ranks > 1:
        torch.distributed.all_reduce(whole)  # every group is one rank's: this adds zeros
    return [[part.tolist() for part in group.split(of_group)] for group, of_group in zip(parts_of, sizes)]


def fit_engine(name: str, scorer: Scorer, forward: Any, layout: Layout | str, dtype: str, device: str) -> Layout:
    """`fit_to_model` for an engine: `forward` is the scorer or what wraps it, and errors begin with the engine's name."""
    try:
        return fit_to_model(scorer, lambda batch: forward(**inputs_of(batch)), layout, PROBE_TOLERANCE[dtype], device)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from None


@torch.no_grad()
def fit_to_model(scorer: Scorer, score: Any, layout: Layout | str, tolerance: float, device: str) -> Layout:
    """Finds out what the loaded model's forward takes, with one short probe.

    The probe compares our head with the model's own logits, and the shared layout with plain rows.

    Args:
        score: runs the scorer on a micro-batch; a collective where the engine is sharded.
        layout: "auto", or what the user insists on.
        tolerance: largest difference of a token's log-prob that the compute type explains.

    Returns:
        The layout to use. Sets `scorer.whole_logits`.

    Raises:
        ValueError: the user insists on a layout that gives wrong numbers with this model, or its dropout cannot be turned off.
    """
    vocabulary = scorer.lm.config.get_text_config().vocab_size
    token = lambda k: (11 + 7919 * k) % vocabulary  # noqa: E731
    group = [token(k) for k in range(7)], [[token(k) for k in range(a, b)] for a, b in ((20, 25), (40, 49))]
    rows = pack([group], "rows").to(device)
    scorer.whole_logits = True
    check_silenced(scorer.lm, lambda: score(rows), device)
    with still(scorer):
        return _probed(scorer, score, layout, tolerance, rows, pack([group], "shared").to(device))


def _probed(
    scorer: Scorer, score: Any, layout: Layout | str, tolerance: float, rows: MicroBatch, shared: MicroBatch
) -> Layout:  # fmt: skip
    """The same with the probe in both layouts, for a model that computes without dropout."""
    own = score(rows)
    scorer.whole_logits = False
    try:
        ours = score(rows)
        scorer.whole_logits = (ours - own).abs().max().item() > tolerance
    except (AttributeError, TypeError, RuntimeError):
        scorer.whole_logits = True  # no usable base model; its own forward is right by definition
    if layout == "rows":
        return "rows"
    if _mask_would_be_wrong(scorer.lm.config):
        if layout == "shared":
            raise ValueError("args.row_layout: this model's attention takes no mask of ours; write auto or rows")
        return "rows"
    try:
        fits = (score(shared) - own).abs().max().item() <= tolerance
    except (AttributeError, TypeError, RuntimeError, ValueError):
        fits = False
    if not fits and layout == "shared":
        raise ValueError("args.row_layout: 'shared' gives other log-probs than plain rows with this model; write auto or rows")
    return "shared" if fits else "rows"


def _mask_would_be_wrong(config: Any) -> bool:
    """A mask of ours replaces the window of sliding-window attention, which a short probe cannot notice."""
    text = config.get_text_config()
    window = getattr(text, "sliding_window", None)
    used = getattr(text, "use_sliding_window", True)
    return (bool(window) and used) or config._attn_implementation not in ("sdpa", "eager")
