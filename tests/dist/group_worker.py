"""Many cases of actors in device groups, in one launch of three ranks: left = {0, 1}, right = {2}. Writes result.json."""

from __future__ import annotations

import copy
import itertools
import json
import random
import sys
import time
import warnings
from pathlib import Path

warnings.filterwarnings("ignore")

import group_cases as cases  # noqa: E402
import torch  # noqa: E402
from export_cases import export_case  # noqa: E402
from reference import ETA, logprob, random_pairs, reference, relative  # noqa: E402
from tiny import save_tiny_model, tiny_lm  # noqa: E402
from value_cases import value_head_cases  # noqa: E402

from comlrl_ds.cluster import call, join  # noqa: E402
from comlrl_ds.cluster.launch import this_identity  # noqa: E402
from comlrl_ds.cluster.layout import Layout, RolePlace, RolloutPlace  # noqa: E402
from comlrl_ds.engines.ds_config import TrainerNumbers, plan_engine  # noqa: E402
from comlrl_ds.engines.engine import PolicyEngine  # noqa: E402
from comlrl_ds.engines.scalar import ScalarEngine  # noqa: E402
from comlrl_ds.learners.madpo import MadpoLearner  # noqa: E402
from comlrl_ds.learners.policy_gradient import PolicyGradientLearner, Samples  # noqa: E402
from comlrl_ds.learners.scalar import RewardFit, ValueFit  # noqa: E402
from comlrl_ds.rollout.engine_process import EngineAddress  # noqa: E402
from comlrl_ds.rollout.transfer import Target, send_live  # noqa: E402

# So large that the rounding of p − lr·g against p does not hide the gradient.
RATE = 2.0**12
ROLES = {"actor.0": "left", "actor.1": "right", "actor.2": "left"}  # the last shares a group with the first
FOLDER = Path(sys.argv[1])


class Bench:
    """The launch, and how a case builds its actors and reads their weights."""

    rate = RATE

    def __init__(self, cluster) -> None:
        self.cluster, self._files = cluster, itertools.count()

    def plan(self, role: str, stage: int, *, dtype="float32", optimizer="SGD", rate=RATE, clip=None, zero=None):
        config = {
            "zero_optimization": {"stage": stage, "reduce_bucket_size": 100_000, **(zero or {})},
            "optimizer": {"type": optimizer},
        }
        world = len(self.cluster.ranks_of(role))
        return plan_engine(config, TrainerNumbers(4, world, rate, clip, dtype, dtype))

    def build(self, seeds: dict[str, int], stages: dict[str, int], *, settings=None, **model) -> list[str]:
        builds = {}
        for role, seed in seeds.items():
            plan = self.plan(role, stages[role], **(settings or {}))
            builds[role] = call(cases.build_tiny, seed, copy.deepcopy(plan), **model)
        self.cluster.create(builds)
        return list(seeds)

    def weights(self, roles: list[str]) -> list[dict[str, torch.Tensor]]:
        files = {role: FOLDER / f"weights-{next(self._files)}.safetensors" for role in roles}
        self.cluster.run({role: call(cases.write_weights, str(file)) for role, file in files.items()})
        found = [cases.state_of(file) for file in files.values()]
        for file in files.values():
            file.unlink()
        return found


def gradient_cases(bench: Bench) -> list[dict]:
    """One SGD step shows each agent's whole gradient; left has data parallel 2, right 1."""
    rows = []
    grid = [(s, r, b, n, "auto", True) for (s, r), b, n in itertools.product(((1, 2), (2, 3), (3, 1)), (30, 4096), (5, 1))]
    grid += [(3, 3, 60, 5, "rows", False), (2, 2, 60, 5, "rows", False), (3, 3, 30, 1, "auto", False)]
    for left, right, budget, pairs, layout, tied in grid:
        seeds = {"actor.0": 10, "actor.1": 11, "actor.2": 12}
        # A single pair of unequal sides may be decided so clearly that its gradient drowns in rounding.
        batch = random_pairs(3, pairs, pairs > 1, pairs + 7 * budget + 3 * left)
        lms = [tiny_lm(seed, scale=2.0, tied=tied) for seed in seeds.values()]
        loss, gradients = reference(lms, batch, False)
        roles = bench.build(seeds, {"actor.0": left, "actor.1": right, "actor.2": right}, layout=layout, tied=tied)
        before = bench.weights(roles)
        report = MadpoLearner(bench.cluster, roles, ETA, max_tokens=budget).step(batch)
        after = bench.weights(roles)
        errors, norms = [], []
        for i in range(3):
            moved = {n: (before[i][n] - after[i][n]) / RATE for n in after[i]}
            errors.append(relative(moved, gradients[i]))
            norms.append(abs(report.grad_norms[i] / float(sum((g**2).sum() for g in gradients[i].values()) ** 0.5) - 1))
        case = {"left": left, "right": right, "budget": budget, "pairs": pairs, "layout": layout, "tied": tied}
        rows.append(
            case | {"errors": errors, "norms": norms, "loss": abs(report.loss - loss), "micro_steps": report.micro_steps}
        )
    return rows


def three_steps(bench: Bench) -> list[dict]:
    """AdamW for three steps against the same three steps of plain torch in one process."""
    rows = []
    for stage, budget in itertools.product((1, 2, 3), (60, 4096)):
        seeds = {"actor.0": 20, "actor.1": 21}
        batch = random_pairs(2, 5, True, 4)
        lms = [tiny_lm(seed, scale=2.0) for seed in seeds.values()]
        start = [{n: p.detach().clone() for n, p in lm.named_parameters()} for lm in lms]
        optimizers = [torch.optim.AdamW(lm.parameters(), lr=1e-3, weight_decay=0.01) for lm in lms]
        for _ in range(3):
            _, gradients = reference(lms, batch, False)
            for lm, optimizer, gradient in zip(lms, optimizers, gradients):
                for n, p in lm.named_parameters():
                    p.grad = gradient[n]
                optimizer.step()
        roles = bench.build(seeds, dict.fromkeys(seeds, stage), settings={"optimizer": "AdamW", "rate": 1e-3})
        learner = MadpoLearner(bench.cluster, roles, ETA, max_tokens=budget)
        for _ in range(3):
            report = learner.step(batch)
        distances = []
        for lm, begin, end in zip(lms, start, bench.weights(roles)):
            wanted = {n: p.detach() - begin[n] for n, p in lm.named_parameters()}
            distances.append(relative({n: end[n] - begin[n] for n in end}, wanted))
        rows.append({"case": [stage, budget], "distances": distances, "micro_steps": report.micro_steps})
    return rows


def scalar_cases(bench: Bench) -> list[dict]:
    """A reward model and a critic: one SGD step shows the whole gradient, on two ranks with more rows than ranks and fewer."""
    rows = []
    for stage, budget, count in itertools.product((1, 2, 3), (40, 4096), (1, 5)):
        r = random.Random(stage * 10 + count)
        pairs = [([r.randrange(3, 320) for _ in range(r.randint(2, 19))], [7, 8, 9 + k]) for k in range(count)]
        pairs[count // 2] = (pairs[0][0], pairs[count // 2][1])  # a critic of prompts reads it once for both responses
        targets = [r.uniform(-2, 2) for _ in pairs]
        for kind in ("reward", "value"):
            plain = cases.tiny_scalar(70)
            value = lambda row, m=plain: m(torch.tensor([row]), torch.arange(len(row))[None], torch.tensor([len(row) - 1]))  # noqa: E731
            if kind == "reward":
                wanted = torch.stack([-torch.nn.functional.logsigmoid(value(w) - value(lo)) for w, lo in pairs]).mean()
            else:
                wanted = 0.6 * torch.stack([(t - value(w)) ** 2 for (w, _), t in zip(pairs, targets)]).mean()
            wanted.backward()
            plan = bench.plan("actor.0", stage)
            bench.cluster.create({"actor.0": call(cases.build_tiny_scalar, 70, copy.deepcopy(plan))})
            before = bench.weights(["actor.0"])[0]
            if kind == "reward":
                report = RewardFit(bench.cluster, "actor.0", budget).step(pairs)
            else:
                report = ValueFit(bench.cluster, "actor.0", budget).step([w for w, _ in pairs], targets, 0.6)
            after = bench.weights(["actor.0"])[0]
            moved = {n: (before[n] - after[n]) / RATE for n in after}
            error = relative(moved, {n: p.grad for n, p in plain.named_parameters()})
            rows.append({"case": [stage, budget, count, kind], "error": error, "loss": abs(report.loss - float(wanted))})
    return rows


def saved_reward_case(bench: Bench) -> dict:
    """CASES 41: a reward model after a step at ZeRO-3 on two ranks, saved; what it says of some rows, also shorter ones."""
    plan = bench.plan("actor.0", 3, optimizer="AdamW", rate=1e-2)
    bench.cluster.create({"actor.0": call(cases.build_tiny_scalar, 71, plan, None)})
    rows = [[5, 6, 7, 8, 9], [11, 12], [13, 14, 15]]
    fit = RewardFit(bench.cluster, "actor.0")
    fit.step([(rows[0], rows[1])])
    bench.cluster.run({"actor.0": call(ScalarEngine.save_pretrained, FOLDER / "reward")})
    return {"folder": str(FOLDER / "reward"), "rows": rows, "values": fit.values(rows)}


def policy_gradient_cases(bench: Bench) -> list[dict]:
    """−A log π over odd and even numbers of samples, against plain torch; a frozen agent stays."""
    rows = []
    for stage, budget, samples in itertools.product((1, 2, 3), (40, 4096), (1, 3, 4)):
        r = random.Random(stage + samples)
        ids = lambda n: [r.randrange(3, 320) for _ in range(n)]  # noqa: E731
        batch = [
            Samples(
                [ids(r.randint(2, 9)) for _ in range(2)], [[ids(r.randint(1, 9)) for _ in range(samples)] for _ in range(2)]
            )
            for _ in range(3)
        ]
        advantages = [[[r.uniform(-1, 1) for _ in range(samples)] for _ in range(2)] for _ in batch]
        seeds = {"actor.0": 80, "actor.1": 81}
        lms = [tiny_lm(seed, scale=2.0) for seed in seeds.values()]
        losses = []
        for i, lm in enumerate(lms):
            terms = [
                -a * logprob(lm, s.prompts[i], c, True)
                for s, adv in zip(batch, advantages)
                for c, a in zip(s.completions[i], adv[i])
            ]
            losses.append(torch.stack(terms).mean())
            losses[-1].backward()
        roles = bench.build(seeds, dict.fromkeys(seeds, stage))
        before = bench.weights(roles)
        frozen = frozenset({1} if samples == 1 else ())
        report = PolicyGradientLearner(bench.cluster, roles, max_tokens=budget, frozen=frozen).step(batch, advantages)
        errors = []
        for i, (b, a, lm) in enumerate(zip(before, bench.weights(roles), lms)):
            moved = {n: (b[n] - a[n]) / RATE for n in a}
            still = max(float(t.abs().max()) for t in moved.values())
            errors.append(still if i in frozen else relative(moved, {n: p.grad for n, p in lm.named_parameters()}))
        away = max(abs(x - float(y)) for x, y in zip(report.losses, losses))
        rows.append({"case": [stage, budget, samples], "errors": errors, "loss": away, "micro_steps": report.micro_steps})
    return rows


def same_step_cases(bench: Bench) -> dict[str, float]:
    """Offload, checkpointing and the pass change how a step is computed, not what it is."""
    batch = random_pairs(2, 4, True, 9)
    seeds = {"actor.0": 30, "actor.1": 31}
    optimizer = {"offload_optimizer": {"device": "cpu"}}
    both = optimizer | {"offload_param": {"device": "cpu"}}
    ways = {
        "base": (2, {}, {}, {}), "checkpointing": (2, {}, {"checkpointing": True}, {}),
        "checkpointing3": (3, {}, {"checkpointing": True}, {}),
        "two_pass": (2, {}, {}, {"margin_pass": "two_pass"}), "two_pass3": (3, {}, {}, {"margin_pass": "two_pass"}),
        "offload2": (2, {"zero": optimizer}, {}, {}), "offload3": (3, {"zero": both}, {}, {}),
    }  # fmt: skip
    found = {}
    for name, (stage, settings, model, learner) in ways.items():
        # AdamW: DeepSpeed offloads no other optimizer.
        adam = {"optimizer": "AdamW", "rate": 1e-3} | settings
        roles = bench.build(seeds, dict.fromkeys(seeds, stage), settings=adam, **model)
        MadpoLearner(bench.cluster, roles, ETA, max_tokens=60, **learner).step(batch)
        found[name] = bench.weights(roles)
    start = [dict(tiny_lm(s, scale=2.0).named_parameters()) for s in seeds.values()]
    moves = {k: [{n: w[n] - s[n].detach() for n in w} for w, s in zip(v, start)] for k, v in found.items()}
    return {k: max(relative(m, b) for m, b in zip(v, moves["base"])) for k, v in moves.items()}


def skip_cases(bench: Bench) -> list[dict]:
    """An infinite gradient on one rank drops the step on all; the step after it is the same as without it."""
    rows = []
    for stage, dtype in itertools.product((1, 2, 3), ("float32", "bfloat16")):
        batch, results = random_pairs(2, 4, True, stage), []
        for bad in (False, True):
            settings = {"optimizer": "AdamW", "rate": 1e-3, "clip": 1.0, "dtype": dtype}
            roles = bench.build({"actor.0": 40, "actor.1": 41}, {"actor.0": stage, "actor.1": stage}, settings=settings)
            learner = MadpoLearner(bench.cluster, roles, ETA, max_tokens=4096)
            learner.step(batch)
            held = bench.weights(roles)
            if bad:
                bench.cluster.run({"actor.0": call(cases.spoil, 1)})
                report = learner.step(batch)
                bench.cluster.run({"actor.0": call(cases.spoil, 1, True)})
                same = all(torch.equal(h[n], w[n]) for h, w in zip(held, bench.weights(roles)) for n in w)
                rows.append({"case": [stage, dtype], "culprit": report.culprit, "unchanged": same})
            learner.step(batch)
            results.append(bench.weights(roles))
        rows[-1]["same_after"] = all(torch.equal(a[n], b[n]) for a, b in zip(*results) for n in a)
    return rows


def uneven_counts(bench: Bench) -> dict:
    """CASES 53: an actor at ZeRO-3 on two ranks, a model at ZeRO-2 on one; 3 steps against 5, and both save."""
    started = time.monotonic()
    adam = {"optimizer": "AdamW", "rate": 1e-3}
    bench.build({"actor.0": 50, "actor.1": 51}, {"actor.0": 3, "actor.1": 2}, settings=adam)
    seconds = time.monotonic() - started
    losses = {}
    for role, steps in (("actor.0", 3), ("actor.1", 5)):
        learner = MadpoLearner(bench.cluster, [role], ETA)
        losses[role] = [learner.step(random_pairs(1, 3, False, 5)).loss for _ in range(steps)]
    folders = {role: FOLDER / f"saved-{role}" for role in losses}
    bench.cluster.run({role: call(PolicyEngine.save_pretrained, folder) for role, folder in folders.items()})
    live = bench.weights(list(losses))
    saved = [cases.state_of(folder / "model.safetensors") for folder in folders.values()]
    same = all(torch.equal(w[n], s[n]) for w, s in zip(live, saved) for n in w)
    return {"seconds": seconds, "losses": losses, "saved": same}


def shard_case(bench: Bench) -> dict:
    """CASES 57: ZeRO-3 on two ranks, from a folder: nobody ever holds the whole, and the whole is the folder's."""
    folder = save_tiny_model(FOLDER / "model57", 57, layers=3)
    plan = bench.plan("actor.0", 3)
    bench.cluster.create({"actor.0": call(cases.peak_during_load, str(folder), plan)})
    shards = bench.cluster.run({"actor.0": call(cases.shards)})["actor.0"]
    whole_at_load, partitioned = bench.cluster.run({"actor.0": call(cases.parts)})["actor.0"]
    loaded, on_disk = bench.weights(["actor.0"])[0], cases.state_of(folder / "model.safetensors")
    same = all(torch.equal(loaded[n], on_disk[n]) for n in on_disk)
    return {"shards": shards, "whole_at_load": whole_at_load, "partitioned": partitioned, "same": same}


def gather_case(bench: Bench) -> list[dict]:
    """CASES 59: a slow engine gets a ZeRO-3 actor's weights; no send starts while a gather is open."""
    rows = []
    bench.build({"actor.0": 60}, {"actor.0": 3}, tied=False)
    bench.cluster.run({"actor.0": call(cases.instrument)})
    wanted = dict(tiny_lm(60, scale=2.0, tied=False).named_parameters())
    for name, size in (("one", 1), ("three", 50_000), ("everything", 1 << 30)):
        slow = cases.SlowEngine(name)
        address = EngineAddress(slow.local, 0, slow.key, "", this_identity(), "nowhere", 0)
        bench.cluster.run({"actor.0": call(cases.gather_by, size)})
        bench.cluster.run({"actor.0": call(cases.noted)})
        target = Target(address, None, 30.0).as_plain()
        sent = call(send_live, "agent_0", f"agent_0@{name}", "float32", [target], chunk_bytes=size)
        result = bench.cluster.run({"actor.0": sent})["actor.0"]
        order = [(kind, what) for kind, what, _ in bench.cluster.run({"actor.0": call(cases.noted)})["actor.0"]]
        open_now, bad = 0, 0
        for kind, what in order:
            open_now += (what == "open") - (what == "close")
            bad += kind == "send" and open_now > 0
        rows.append({
            "case": name, "sends_in_gathers": bad, "gathers": order.count(("gather", "open")), "chunks": slow.chunks,
            "bytes": result[0]["bytes"], "same": slow.tensors.keys() == wanted.keys()
            and all(torch.equal(slow.tensors[n], p) for n, p in wanted.items()),
        })  # fmt: skip
    return rows


def exported_case(bench: Bench) -> list[str]:
    return export_case(bench, FOLDER)


def overlap_case(bench: Bench) -> dict[str, float]:
    """Two actors in two groups are at work at the same time; two in one group take turns."""
    batch = random_pairs(2, 24, False, 3)
    found = {}
    for name, roles in (("apart", ["actor.0", "actor.1"]), ("together", ["actor.0", "actor.2"])):
        bench.build({role: 70 + k for k, role in enumerate(roles)}, dict.fromkeys(roles, 2), layers=6)
        learner = MadpoLearner(bench.cluster, roles, ETA)
        learner.step(batch)
        found[name] = learner.step(batch).overlap
    return found


def main() -> None:
    cluster = join()
    if not cluster.is_main:
        while cluster.serve()[0] != "leave":
            pass
        return
    places = {role: RolePlace(group) for role, group in ROLES.items()}
    layout = Layout(tuple(cluster.slots()), {"left": (0, 1), "right": (2,)}, places, RolloutPlace(("left",)))
    cluster.arrange(layout, 300, FOLDER)
    cluster.join_groups("cpu")
    bench = Bench(cluster)
    result = {}
    for case in (
        gradient_cases,
        three_steps,
        scalar_cases,
        saved_reward_case,
        policy_gradient_cases,
        value_head_cases,
        same_step_cases,
        skip_cases,
        uneven_counts,
        shard_case,
        gather_case,
        exported_case,
        overlap_case,
    ):
        started = time.monotonic()
        result[case.__name__] = case(bench)
        print(f"{case.__name__}: {time.monotonic() - started:.1f} s", flush=True)
        (FOLDER / "result.json").write_text(json.dumps(result))
    cluster.dismiss()


if __name__ == "__main__":
    main()
