"""Value heads on actors, and importance ratios, against plain torch: cases of group_worker.py."""

from __future__ import annotations

import itertools
import random

import torch
from group_cases import head_weights
from reference import relative
from tiny import tiny_lm

from comlrl_ds.cluster import call
from comlrl_ds.engines.heads import make_head
from comlrl_ds.learners.policy_gradient import PolicyGradientLearner, Samples, ValueTargets

COEFFICIENT, CLIP, IMPORTANCE = 0.6, 0.3, 1.5
SEEDS = {"actor.0": 90, "actor.1": 91}


def value_head_cases(bench) -> list[dict]:
    """One step on policy and value loss at every stage; the second agent shares no rank with the first."""
    rows = []
    for stage, kind, samples, layout in [
        *itertools.product((1, 2, 3), ("v", "q"), (1, 3), ("auto",)), (2, "q", 2, "rows"), (3, "v", 2, "rows"),
    ]:  # fmt: skip
        case = _Case(stage, kind, samples)
        roles = bench.build(SEEDS, dict.fromkeys(SEEDS, stage), layout=layout, value_head=8)
        before = bench.weights(roles), bench.cluster.run({role: call(head_weights) for role in roles})
        learner = PolicyGradientLearner(
            bench.cluster, roles, max_tokens=60, critic_type=kind, importance_clip=None if samples == 3 else IMPORTANCE
        )
        report = learner.step(case.batch, case.advantages, case.values)
        after = bench.weights(roles), bench.cluster.run({role: call(head_weights) for role in roles})
        errors = []
        for i, role in enumerate(roles):
            loss, gap, lm, head = case.by_torch(i, role, learner.importance_clip)
            moved = {n: (before[0][i][n] - after[0][i][n]) / bench.rate for n in after[0][i]}
            own = {
                n: (torch.tensor(b) - torch.tensor(a)) / bench.rate
                for (n, b), (_, a) in zip(before[1][role], after[1][role], strict=True)
            }
            errors += [
                relative(moved, {n: p.grad for n, p in lm.named_parameters()}),
                relative(own, {n: p.grad for n, p in head.named_parameters()}),
                abs(report.value_losses[i] - loss), abs(report.gaps[i] - gap),
            ]  # fmt: skip
        rows.append({"case": [stage, kind, samples, layout], "errors": errors, "micro_steps": report.micro_steps})
    return rows


class _Case:
    """Three tasks for two agents, engines that were off by up to 1 nat a token, and values both near and far from the old."""

    def __init__(self, stage: int, kind: str, samples: int) -> None:
        r = random.Random(f"{stage} {kind} {samples}")
        ids = lambda n: [r.randrange(3, 320) for _ in range(n)]  # noqa: E731
        self.kind, self.samples = kind, samples
        agents, tasks = range(2), range(3)
        prompts = [[ids(r.randint(2, 9)) for _ in agents] for _ in tasks]
        answers = [[[ids(r.randint(1, 9)) for _ in range(samples)] for _ in agents] for _ in tasks]
        self.off = [[[[r.uniform(-1, 1) for _ in c] for c in row] for row in task] for task in answers]
        lms = [tiny_lm(seed, scale=2.0) for seed in SEEDS.values()]
        self.batch = []
        for k in tasks:
            engine = [
                [
                    [float(x) + o for x, o in zip(_token_logprobs(lms[i], prompts[k][i], c)[0], self.off[k][i][g])]
                    for g, c in enumerate(answers[k][i])
                ]
                for i in agents
            ]
            self.batch.append(Samples(prompts[k], answers[k], engine))
        self.advantages = [[[r.uniform(-1, 1) for _ in range(samples)] for _ in agents] for _ in tasks]
        shape = (2, 3, samples)
        draw = lambda: torch.tensor([r.uniform(-1, 1) for _ in range(6 * samples)], dtype=torch.float64).view(shape)  # noqa: E731
        self.values = ValueTargets(draw(), draw(), CLIP, COEFFICIENT)

    def by_torch(self, i: int, role: str, clip: float | None):
        """(value loss, mean gap, model and head with their gradients) of one agent, sample by sample."""
        lm, head = tiny_lm(SEEDS[role], scale=2.0), make_head(64, SEEDS[role], 8)
        total, value_total, gaps = torch.zeros(()), torch.zeros((), dtype=torch.float64), []
        count = len(self.batch) * self.samples
        for (k, task), g in itertools.product(enumerate(self.batch), range(self.samples)):
            logps, hidden = _token_logprobs(lm, task.prompts[i], task.completions[i][g])
            theirs = torch.tensor(task.logprobs[i][g])
            gaps += (logps.detach() - theirs).abs().tolist()
            ratio = 1.0 if clip is None else (logps.detach() - theirs).exp().clamp(max=clip)
            total = total - self.advantages[k][i][g] * (ratio * logps).sum() / count
            v = head(hidden[len(task.prompts[i]) - 1 if self.kind == "v" else -1]).squeeze().double()
            target, old = self.values.targets[i, k, g], self.values.old[i, k, g]
            near = old + (v - old).clamp(-CLIP, CLIP)
            value_total = value_total + COEFFICIENT * torch.maximum((target - v) ** 2, (target - near) ** 2) / count
        (total + value_total).backward()
        return float(value_total), sum(gaps) / len(gaps), lm, head


def _token_logprobs(lm, prompt, completion):
    """(log-probs of the completion's tokens, hidden states of all tokens): one plain forward."""
    out = lm(torch.tensor([[*prompt, *completion]]), output_hidden_states=True)
    z = out.logits[0].log_softmax(-1)
    return torch.stack([z[len(prompt) - 1 + n, t] for n, t in enumerate(completion)]), out.hidden_states[-1][0]
