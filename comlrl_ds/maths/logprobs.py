"""Log-probabilities of chosen tokens without ever holding the logits of a whole batch."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint


def token_logprobs(hidden: Tensor, target: Tensor, head: Callable[[Tensor], Tensor], chunk: int, parts: int = 1) -> Tensor:
    """log p(target) from hidden states, in nats: z[target] − logsumexp(z), z = head(hidden) in fp32 or wider.

    Args:
        hidden: [N, d], only the positions that predict a scored token.
        target: [N] token ids.
        head: the vocabulary projection, [n, d] → [n, V].
        chunk: tokens that reach the vocabulary at once. With more of them and gradients on, a chunk's logits are
            recomputed in backward, so peak memory is O(chunk · V) instead of O(N · V).
        parts: least number of calls of the head, some of them with nothing where N is small. Ranks that share a sharded
            model must call it equally often (`parts_for`).

    Returns:
        [N], in fp32 (fp64 where the head computes in fp64).
    """

    def score(h: Tensor, t: Tensor) -> Tensor:
        z = head(h)
        z = z if z.dtype == torch.float64 else z.float()
        return z.gather(-1, t[:, None])[:, 0] - z.logsumexp(-1)

    parts = max(parts, parts_for(len(target), chunk))
    if parts == 1:
        return score(hidden, target)
    scored = [
        checkpoint(score, h, t, use_reentrant=False) if torch.is_grad_enabled() else score(h, t)
        for h, t in zip(hidden.tensor_split(parts), target.tensor_split(parts))
    ]
    return torch.cat(scored)


def parts_for(tokens: int, chunk: int) -> int:
    """Calls of the vocabulary projection for so many scored tokens."""
    return max(1, -(-tokens // chunk))


def sum_by_side(logprobs: Tensor, side: Tensor, sides: int) -> Tensor:
    """Σ of token log-probs per completion: [N] and [N] → [sides]. One without tokens gives 0.

    A sum, never a mean: a longer completion is a less probable one.
    """
    return logprobs.new_zeros(sides).index_add(0, side, logprobs)


def additive_mask(visible: Tensor, dtype: torch.dtype) -> Tensor:
    """[B, W, W] bool → [B, 1, W, W]: 0 where visible, the dtype's minimum elsewhere.

    Additive on purpose: the eager attention of transformers adds whatever mask it gets, so a bool mask is silently wrong.
    """
    mask = torch.zeros(visible.shape, dtype=dtype, device=visible.device)
    return mask.masked_fill_(~visible, torch.finfo(dtype).min)[:, None]
