"""Policy-gradient steps of MARLHF, from the sampled tokens to the weights, against plain torch."""

from __future__ import annotations

import pytest
import torch
from marlhf_runs import (
    STAGE_1,
    actors,
    ids_of,
    logprob,
    plain,
    relative,
    rows,
    sampled,
    save_stopping_model,
    trainer,
    weights,
)
from tasks_for_tests import items, text

from comlrl_ds.learners.policy_gradient import PolicyGradientLearner, Samples
from comlrl_ds.trainers.preference.reward_learning import RewardLearner

RATE = 1e-3
REWARDS = [0.9, -0.4, 0.1]
MEAN, SPREAD = 0.2, (0.98 / 3 - 0.04) ** 0.5
# Worth of the three responses beyond each backend's baseline, by hand. A v-critic gives all three one value, which the
# normalisation of maac and iac takes away again.
WORTH = {
    "magrpo": [(r - MEAN) / SPREAD for r in REWARDS], "mareinforce": REWARDS, "marloo": [1.05, -0.9, -0.15],
    "maremax": [0.0, -1.3, -0.8], "maac": [(r - MEAN) / SPREAD for r in REWARDS], "iac": [(r - MEAN) / SPREAD for r in REWARDS],
}  # fmt: skip


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("stopping")
    return [save_stopping_model(folder / f"model_{seed}", seed) for seed in (1, 2)]


# --- one step of a run
@pytest.mark.parametrize("algorithm", WORTH)
def test_one_step_is_that_of_plain_torch_and_favours_the_better_response(tmp_path, models, monkeypatch, algorithm):
    """W4: loss = −mean A log π over the sampled tokens, stop token included, pads excluded. One task, three responses, SGD."""
    monkeypatch.setattr(RewardLearner, "scores", lambda *_: list(REWARDS))
    critic = algorithm in ("maac", "iac")
    args = {
        "rl_algorithm": algorithm, "num_generations": 3, "rollout_buffer_size": 3 if critic else 1, "max_new_tokens": 24,
        "agent_learning_rate": RATE, "reward_eval_fraction": 0.0,
    }  # fmt: skip
    run = tmp_path / "run"
    sgd = STAGE_1 | {"optimizer": {"type": "SGD"}}
    names = {"agent_model": None, "agents": list(map(str, models))}
    with trainer(run, models[0], args=args, train_dataset=items()[:1], deepspeed=sgd, **names) as t:
        t.train()
    (step,) = rows(run, "rl/loss/agent_0")
    completions, prompt, worth = sampled(run), ids_of(text(items()[0])), WORTH[algorithm]
    best, worst = worth.index(max(worth)), worth.index(min(worth))
    for i, model in enumerate(models):
        mine = [completions[0, i, g] for g in range(3)]
        assert len({len(c) for c in mine}) > 1 and any(len(c) < 24 for c in mine)  # there is something to pad
        lm = plain(model)
        each = [logprob(lm, prompt, c) for c in mine]
        loss = -torch.stack([a * score for a, score in zip(worth, each)]).mean()
        loss.backward()
        each = [float(score.detach()) for score in each]
        assert step[f"rl/loss/agent_{i}"] == pytest.approx(loss.item(), rel=1e-4)
        assert step[f"rl/logprob/agent_{i}"] == pytest.approx(sum(each) / 3, rel=1e-4)
        before = {n: p.detach() for n, p in lm.named_parameters()}
        after = plain(run / f"final/agent_{i}")
        moved = {n: (before[n] - p.detach()) / RATE for n, p in after.named_parameters()}
        assert relative(moved, {n: p.grad for n, p in lm.named_parameters()}) < 1e-3
        # With pads up to the longest sibling both would be others.
        with torch.no_grad():
            padded = [float(logprob(lm, prompt, c + [2] * (max(map(len, mine)) - len(c)))) for c in mine]
        assert abs(sum(padded) - sum(each)) > 1
        # Up the gradient, to first order: the better response gains on the worse one.
        with torch.no_grad():
            gain = [float(logprob(after, prompt, mine[g])) - each[g] for g in (best, worst)]
        assert gain[0] > gain[1]


# --- one step of the learner
def test_the_weight_of_a_completion_does_not_depend_on_its_siblings_lengths(tmp_path, models):
    """W4: the gradient of a response's −A log π is the same beside a sibling of one token and beside one of thirty."""
    prompt, response = ids_of("Topic: bees. Answer:"), [90, 91, 92, 2]
    moves, losses = [], []
    for sibling in ([2], [*range(100, 129), 2]):
        with actors(tmp_path, models[:1], dtype="float32", optimizer="SGD", rate=1.0) as cluster:
            engine = cluster.local("actor.0")
            before = weights(engine)
            report = PolicyGradientLearner(cluster, ["actor.0"]).step(
                [Samples([prompt], [[response, sibling]])], [[[1.0, 0.0]]]
            )
            moves.append({n: before[n] - p for n, p in weights(engine).items()})
            losses.append(report.losses[0])
    lm = plain(models[0])
    loss = -logprob(lm, prompt, response) / 2
    loss.backward()
    assert losses == pytest.approx([loss.item()] * 2, rel=1e-5)
    assert relative(moves[0], moves[1]) < 1e-4
    assert relative(moves[0], {n: p.grad for n, p in lm.named_parameters()}) < 1e-4


def test_samples_of_a_prompt_share_its_row_wherever_they_stand(tmp_path, models):
    """One response a time, as actor-critics take them from a buffer: two of the one task, between them one of the other."""
    prompts = [ids_of("Topic: bees. Answer:"), ids_of("Topic: old stone bridges. Answer:")]
    batch = [(0, [90, 91, 92, 2]), (1, [100, 2]), (0, [110, 111, 2])]
    worth = [1.0, -0.5, -2.0]
    with actors(tmp_path, models[:1], dtype="float32", optimizer="SGD", rate=1.0) as cluster:
        engine = cluster.local("actor.0")
        before = weights(engine)
        report = PolicyGradientLearner(cluster, ["actor.0"]).step(
            [Samples([prompts[k]], [[response]]) for k, response in batch], [[[a]] for a in worth]
        )
        moved = {n: before[n] - p for n, p in weights(engine).items()}
    rows = [len(prompts[0]) + 3 + 2, len(prompts[1]) + 1]  # a row for each prompt, in one forward
    assert (report.micro_steps, report.tokens) == (1, 2 * max(rows))
    lm = plain(models[0])
    loss = -torch.stack([a * logprob(lm, prompts[k], c) for a, (k, c) in zip(worth, batch)]).mean()
    loss.backward()
    assert report.losses == pytest.approx([loss.item()], rel=1e-5)
    assert relative(moved, {n: p.grad for n, p in lm.named_parameters()}) < 1e-4


def test_small_steps_add_up_in_bf16(tmp_path, models):
    """W6: at 5e-6 the fp32 masters of a bf16 actor all move; the weights of AdamW in bf16 alone hardly ever do."""
    from deepspeed.utils import safe_get_full_fp32_param

    prompt, steps, rate = ids_of("Topic: soil. Answer:"), 20, 5e-6
    mine = [[90, 91, 92, 2], [100, 101, 2], [110, 2]]
    worth = [1.0, -1.0, 0.5]
    with actors(tmp_path, models[:1], dtype="bfloat16", optimizer="AdamW", rate=rate) as cluster:
        engine = cluster.local("actor.0")
        masters = lambda: {n: safe_get_full_fp32_param(p).clone() for n, p in engine.scorer.lm.named_parameters()}  # noqa: E731
        start, began = masters(), weights(engine)
        learner = PolicyGradientLearner(cluster, ["actor.0"])
        reports = [learner.step([Samples([prompt], [mine])], [[worth]]) for _ in range(steps)]
        end, ended = masters(), weights(engine)
    assert {t.dtype for t in end.values()} == {torch.float32} and {t.dtype for t in ended.values()} == {torch.bfloat16}
    names = [n for n in start if "proj" in n]
    assert names and share(start, end, names) > 0.99
    assert all(torch.equal(ended[n], end[n].bfloat16()) for n in end)  # what computes is the masters, rounded
    assert reports[-1].losses[0] < reports[0].losses[0]
    # The same steps in plain torch, in bf16 throughout.
    lm = plain(models[0]).bfloat16()
    first = {n: p.detach().clone() for n, p in lm.named_parameters()}
    optimizer = torch.optim.AdamW(lm.parameters(), lr=rate, weight_decay=0.01)
    for _ in range(steps):
        optimizer.zero_grad()
        (-torch.stack([a * logprob(lm, prompt, c) for a, c in zip(worth, mine)]).mean()).backward()
        optimizer.step()
    last = {n: p.detach() for n, p in lm.named_parameters()}
    assert share(first, last, names) < 0.03 and share(began, ended, names) > 0.1


def share(before, after, names):
    """Share of the weights that have moved."""
    moved = sum(int((before[n] != after[n]).sum()) for n in names)
    return moved / sum(before[n].numel() for n in names)
