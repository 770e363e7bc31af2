"""Losses as functions of scores, with their derivatives where a learner needs them apart from autograd."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid


@dataclass(frozen=True)
class MadpoTerms:
    """Per-pair terms of the MADPO loss; every tensor has shape [pairs]."""

    joint_margin: Tensor
    loss: Tensor
    slope: Tensor


def madpo_terms(margins: Tensor, eta: float) -> MadpoTerms:
    """MADPO's terms from the margins of every agent.

    Args:
        margins: shape [agents, pairs], m_i = log π_i(a_i^w | h_i) − log π_i(a_i^l | h_i), in nats.
        eta: η, the `dpo_beta` of the configuration, > 0.

    Returns:
        Δ = Σ_i m_i;  loss = −log σ(η Δ);  slope = ∂loss/∂m_i = −η σ(−η Δ), the same for every agent.
        A mean over a batch divides both by the number of its pairs.

    Source: Multi-LLM PbRL page, section MADPO.
    """
    if margins.dim() != 2:
        raise ValueError(f"margins must have shape [agents, pairs], got {tuple(margins.shape)}")
    joint = margins.sum(0)
    return MadpoTerms(joint, -logsigmoid(eta * joint), -eta * torch.sigmoid(-eta * joint))
