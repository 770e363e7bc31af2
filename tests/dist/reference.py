"""The joint step by the textbook: random pairs, two passes with plain transformers models, and how far results are apart."""

from __future__ import annotations

import random

import torch

from comlrl_ds.maths.packing import PairTokens

ETA = 0.1


def random_pairs(agents: int, pairs: int, unequal: bool, seed: int) -> list[list[PairTokens]]:
    r = random.Random(seed)
    ids = lambda n: [r.randrange(3, 320) for _ in range(n)]  # noqa: E731
    size = lambda low, high: r.randint(low, high) if unequal else high  # noqa: E731
    batch = [[PairTokens(ids(size(2, 12)), ids(size(1, 14)), ids(size(2, 14))) for _ in range(agents)] for _ in range(pairs)]
    if unequal:
        batch[0][0] = PairTokens(ids(5), ids(1), ids(9))  # a one-token winner
    return batch


def logprob(lm, prompt, completion, score_last: bool):
    """Plain: one sequence, one forward, the sum over scored completion tokens."""
    scored = completion if score_last else completion[:-1]
    if not scored:
        return torch.zeros(())
    z = lm(torch.tensor([[*prompt, *scored]])).logits[0].log_softmax(-1)
    return sum(z[len(prompt) - 1 + k, t] for k, t in enumerate(scored))


def reference(lms, batch, score_last: bool):
    """Two passes, as on the page: all margins without gradients, then each agent's own with the others' detached."""
    margins = torch.zeros(len(lms), len(batch))
    with torch.no_grad():
        for i, lm in enumerate(lms):
            for k, pair in enumerate(batch):
                p = pair[i]
                margins[i, k] = logprob(lm, p.prompt, p.winner, score_last) - logprob(lm, p.prompt, p.loser, score_last)
    gradients, loss = [], None
    for i, lm in enumerate(lms):
        lm.zero_grad()
        own = torch.stack(
            [
                logprob(lm, b[i].prompt, b[i].winner, score_last) - logprob(lm, b[i].prompt, b[i].loser, score_last)
                for b in batch
            ]
        )
        joint = own + margins.sum(0) - margins[i]
        loss = -torch.nn.functional.logsigmoid(ETA * joint).mean()
        loss.backward()
        gradients.append({n: p.grad.clone() for n, p in lm.named_parameters()})
    return float(loss), gradients


def relative(a: dict, b: dict) -> float:
    top = sum(((a[n].double() - b[n].double()) ** 2).sum() for n in b) ** 0.5
    return float(top / sum((b[n].double() ** 2).sum() for n in b) ** 0.5)
