"""Numbers of the reward fit and of policy learning: advantages, KL, value and preference losses, importance weights.

All are computed and returned in float64: they are few, and a deviation or a KL near 0 is lost to rounding in less.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

AdvantageMode = Literal["mean", "raw", "max", "rloo"]
LEAST_DEVIATION = 1e-6


def advantages(returns: Tensor, mode: AdvantageMode) -> Tensor:
    """What each joint response is worth beyond its task's baseline, in units of the return.

    Args:
        returns: [tasks, G], ρ_g = r_g − β·KL_g of one agent.
        mode: mean: ρ_g − mean(ρ); raw: ρ_g; max: ρ_g − max(ρ); rloo: ρ_g − mean of the other G−1.

    Returns:
        [tasks, G]. Of a single response, mean and max make 0.

    Raises:
        ValueError: another shape, no response, an unknown mode, or rloo of one response, which has no others.

    Source: SPEC §2, table of policy learning.
    """
    if returns.dim() != 2 or returns.shape[1] < 1:
        raise ValueError(f"returns must have shape [tasks, G] with G of at least 1, got {tuple(returns.shape)}")
    returns = returns.double()
    size = returns.shape[1]
    if mode == "raw":
        return returns.clone()
    if mode == "mean":
        return returns - returns.mean(1, keepdim=True)
    if mode == "max":
        return returns - returns.amax(1, keepdim=True)
    if mode != "rloo":
        raise ValueError(f"mode {mode!r} is not one of mean, raw, max, rloo")
    if size < 2:
        raise ValueError("rloo compares a response with the others of its task; it needs at least 2, got 1")
    return returns - (returns.sum(1, keepdim=True) - returns) / (size - 1)


def normalized(adv: Tensor, groups: Literal["row", "all"] = "row") -> Tensor:
    """(A − mean(A)) / max(std(A), 1e-6) with the population's deviation, without unit.

    Args:
        adv: advantages; [tasks, G] for rows, any shape for all.
        groups: row: within each task (REINFORCE); all: over the whole tensor (actor-critic buffers).

    Returns:
        The shape of `adv`. A group of one stays as it is: its deviation says nothing, and 0 would end all learning.

    Raises:
        ValueError: rows of something that has none, or an unknown grouping.
    """
    if groups not in ("row", "all"):
        raise ValueError(f"groups {groups!r} is not one of row, all")
    if groups == "row" and adv.dim() != 2:
        raise ValueError(f"rows need the shape [tasks, G], got {tuple(adv.shape)}")
    adv = adv.double()
    rows = adv if groups == "row" else adv.reshape(1, -1)
    if rows.shape[1] < 2:
        return adv.clone()
    centred = rows - rows.mean(1, keepdim=True)
    deviation = centred.square().mean(1, keepdim=True).sqrt()
    return (centred / deviation.clamp(min=LEAST_DEVIATION)).view_as(adv)


def k3(logp: Tensor, logp_ref: Tensor) -> Tensor:
    """exp(d) − d − 1 with d = log p_ref − log p: an estimate of KL(p ‖ p_ref) from tokens sampled from p, in nats.

    Args:
        logp: log-probs of the sampled tokens under the policy, any shape.
        logp_ref: the same under the reference.

    Returns:
        The same shape; at least 0 but for rounding, and 0 where both agree.

    Raises:
        ValueError: shapes that differ.
    """
    _same_shape(logp=logp, logp_ref=logp_ref)
    d = logp_ref.double() - logp.double()
    return torch.expm1(d) - d


def kl_sum(token_kl: Tensor, lengths: Tensor) -> Tensor:
    """Σ over the tokens of each completion, its EOS included and no padding; in the unit of `token_kl`.

    Args:
        token_kl: [completions, T], padded on the right with anything; or [N], completion after completion.
        lengths: [completions], tokens of each, whole numbers.

    Returns:
        [completions]; 0 for a completion without tokens.

    Raises:
        ValueError: lengths that do not fit.
    """
    lengths = lengths.to(token_kl.device)
    token_kl = token_kl.double()
    if lengths.dim() != 1 or lengths.is_floating_point() or (lengths < 0).any():
        raise ValueError("lengths must be whole numbers of at least 0, one per completion")
    if token_kl.dim() == 1:
        if int(lengths.sum()) != len(token_kl):
            raise ValueError(f"lengths add up to {int(lengths.sum())}, but there are {len(token_kl)} tokens")
        completion = torch.arange(len(lengths), device=token_kl.device).repeat_interleave(lengths)
        return token_kl.new_zeros(len(lengths)).index_add(0, completion, token_kl)
    if token_kl.dim() != 2 or len(token_kl) != len(lengths) or (lengths > token_kl.shape[1]).any():
        longest = int(lengths.max()) if len(lengths) else 0
        raise ValueError(f"{len(lengths)} completions of up to {longest} tokens do not fit {tuple(token_kl.shape)}")
    padding = torch.arange(token_kl.shape[1], device=token_kl.device) >= lengths[:, None]
    # Filled, not multiplied: padding may hold NaN or infinity.
    return token_kl.masked_fill(padding, 0).sum(1)


def value_loss(v: Tensor, target: Tensor, old: Tensor | None = None, clip: float | None = None) -> Tensor:
    """mean (target − V)², in squared units of the return.

    With `clip`, mean max((target − V)², (target − V')²), V' = V_old + clamp(V − V_old, ±clip): a value that has moved
    further than `clip` towards its target gains nothing more.

    Args:
        v: [samples], values with gradient.
        target: [samples], returns.
        old: [samples], V_old at collection; only read with `clip`.
        clip: ε > 0; None does not clip.

    Returns:
        A scalar.

    Raises:
        ValueError: shapes that differ, no samples, a clip that is not positive, or one without `old`.
    """
    _same_shape(v=v, target=target)
    if not v.numel():
        raise ValueError("no samples: their mean is undefined")
    v, target = v.double(), target.double()
    loss = (target - v).square()
    if clip is None:
        return loss.mean()
    if old is None:
        raise ValueError("clip needs old, the values at collection")
    if not clip > 0:
        raise ValueError(f"clip must be positive, got {clip}")
    _same_shape(v=v, old=old)
    old = old.double()
    clipped = old + (v - old).clamp(-clip, clip)
    return torch.maximum(loss, (target - clipped).square()).mean()


@dataclass(frozen=True)
class BradleyTerryTerms:
    """Per-pair terms of the reward fit; every tensor has shape [pairs]."""

    margin: Tensor
    loss: Tensor
    winner_slope: Tensor
    loser_slope: Tensor

    @property
    def mean(self) -> Tensor:
        """The loss of the batch, a scalar; NaN without pairs."""
        return self.loss.mean()


def bradley_terry(winner: Tensor, loser: Tensor) -> BradleyTerryTerms:
    """The Bradley–Terry loss of scored pairs.

    Args:
        winner: [pairs], R_w, scores of the winners.
        loser: [pairs], R_l, those of the losers.

    Returns:
        margin = R_w − R_l;  loss = −log σ(margin), in nats, whose `mean` is the batch's;
        slopes ∂loss/∂R_w = −σ(−margin) and ∂loss/∂R_l = σ(−margin), each of its own pair's loss.
        A mean over a batch divides loss and slopes by the number of its pairs.

    Raises:
        ValueError: shapes that differ or are not [pairs].

    Source: Multi-LLM PbRL page, section MARLHF, reward learning.
    """
    _same_shape(winner=winner, loser=loser)
    if winner.dim() != 1:
        raise ValueError(f"scores must have shape [pairs], got {tuple(winner.shape)}")
    margin = winner.double() - loser.double()
    slope = torch.sigmoid(-margin)
    return BradleyTerryTerms(margin, -logsigmoid(margin), -slope, slope)


def importance_weights(
    logp_trainer: Tensor, logp_engine: Tensor, mode: Literal["none", "truncated"], clip: float = 2.0
) -> Tensor:
    """Weights that correct for the engine having sampled from a distribution that is not quite the trainer's.

    Args:
        logp_trainer: log-probs of what was sampled, per token or per completion, in nats.
        logp_engine: the same, as the engine computed them.
        mode: none: 1; truncated: min(exp(log p_trainer − log p_engine), clip).
        clip: largest weight, > 0.

    Returns:
        The same shape, without gradient: a weight is a constant of the loss.

    Raises:
        ValueError: shapes that differ, an unknown mode, or a clip that is not positive.
    """
    if mode not in ("none", "truncated"):
        raise ValueError(f"mode {mode!r} is not one of none, truncated")
    _same_shape(logp_trainer=logp_trainer, logp_engine=logp_engine)
    if not clip > 0:
        raise ValueError(f"clip must be positive, got {clip}")
    gap = logp_trainer.detach().double() - logp_engine.detach().double()
    return torch.ones_like(gap) if mode == "none" else gap.exp().clamp(max=clip)


def _same_shape(**tensors: Tensor) -> None:
    """[N] with [N, 1] would broadcast to [N, N], and the mean would look like one."""
    (a, first), (b, second) = tensors.items()
    if first.shape != second.shape:
        raise ValueError(f"{a} and {b} must have the same shape, got {tuple(first.shape)} and {tuple(second.shape)}")
