"""Many cases of the joint step through real DeepSpeed engines, in one launch. Writes result.json for test_madpo_engine.py."""

from __future__ import annotations

import copy
import itertools
import json
import sys
import warnings
from pathlib import Path

warnings.filterwarnings("ignore")

import torch  # noqa: E402
from reference import ETA, random_pairs, reference, relative  # noqa: E402
from tiny import tiny_lm  # noqa: E402

from comlrl_ds.cluster import call, join  # noqa: E402
from comlrl_ds.cluster.hostfile import slots_of_one_host  # noqa: E402
from comlrl_ds.cluster.layout import Layout, RolePlace, RolloutPlace  # noqa: E402
from comlrl_ds.engines.ds_config import TrainerNumbers, plan_engine  # noqa: E402
from comlrl_ds.engines.engine import PolicyEngine  # noqa: E402
from comlrl_ds.learners.madpo import MadpoLearner  # noqa: E402

# So large that the rounding of p − lr·g against p does not hide the gradient.
RATE = 2.0**12


def build(
    lms, *, stage: int, dtype: str = "float32", optimizer: str = "SGD", rate: float = RATE, clip=None, extra=None, layout="auto"
):
    config = {"zero_optimization": {"stage": stage, "reduce_bucket_size": 100_000}, "optimizer": {"type": optimizer}}
    for name, value in (extra or {}).items():
        config[name] = {**config.get(name, {}), **value} if isinstance(value, dict) else value
    plan = plan_engine(config, TrainerNumbers(4, 1, rate, clip, dtype, dtype))
    models = {f"actor.{i}": copy.deepcopy(lm).to(getattr(torch, dtype)) for i, lm in enumerate(lms)}
    cluster = join()
    cluster.create({role: call(make_engine, lm, copy.deepcopy(plan), layout) for role, lm in models.items()})
    return {role: cluster.local(role) for role in models}


def make_engine(seat, lm, plan, layout) -> PolicyEngine:
    return PolicyEngine(seat.role, lm, plan, layout=layout, chunk=16)


def weights(engine) -> dict[str, torch.Tensor]:
    return {n: t.clone() for n, t in engine.named_weights()}


def gradient_cases(cluster) -> list[dict]:
    rows = []
    grid = [(a, s, m, u, 2, "auto") for a, s, m, u in itertools.product((1, 2, 3), (False, True), (30, 4096), (False, True))]
    grid += [(2, s, m, True, stage, "auto") for s, m, stage in itertools.product((False, True), (30, 4096), (1, 3))]
    grid += [(2, False, 60, True, 3, "rows")]
    for agents, score_last, budget, unequal, stage, layout in grid:
        lms = [tiny_lm(10 + i, scale=2.0) for i in range(agents)]
        batch = random_pairs(agents, 5, unequal, agents + 7 * budget + 3 * stage)
        loss, gradients = reference(lms, batch, score_last)
        actors = build(lms, stage=stage, layout=layout)
        before = {role: weights(e) for role, e in actors.items()}
        learner = MadpoLearner(cluster, list(actors), ETA, score_last_token=score_last, max_tokens=budget)
        report = learner.step(batch)
        errors, norms = [], []
        for i, (role, engine) in enumerate(actors.items()):
            after = weights(engine)
            errors.append(relative({n: (before[role][n] - after[n]) / RATE for n in after}, gradients[i]))
            norms.append(abs(report.grad_norms[i] / float(sum((g**2).sum() for g in gradients[i].values()) ** 0.5) - 1))
        rows.append(
            {
                "case": [agents, score_last, budget, unequal, stage, layout], "loss": abs(report.loss - loss), "errors": errors,
                "norms": norms, "micro_steps": report.micro_steps,
            }
        )  # fmt: skip
    return rows


def skip_cases(cluster) -> list[dict]:
    """A dropped step changes nothing, and the step after it is the same as without it."""
    rows = []
    offload = {"zero_optimization": {"offload_optimizer": {"device": "cpu"}}}
    grid = [(stage, dtype, None) for stage in (1, 2, 3) for dtype in ("float32", "bfloat16")]
    for stage, dtype, extra in [*grid, (2, "float32", offload), (3, "float32", offload)]:
        lms = [tiny_lm(20 + i, scale=2.0) for i in range(2)]
        batch = random_pairs(2, 4, True, stage)
        results = []
        for bad in (False, True):
            actors = build(lms, stage=stage, dtype=dtype, optimizer="AdamW", rate=1e-3, clip=1.0, extra=extra)
            learner = MadpoLearner(cluster, list(actors), ETA, max_tokens=60)
            learner.step(batch)
            held = {role: weights(e) for role, e in actors.items()}
            if bad:
                # One agent's gradient overflows although every score is finite: its share is scaled to infinity.
                real = actors["actor.1"].backward
                actors["actor.1"].backward = lambda w, real=real: real([[x * float("inf") for x in row] for row in w])
                report = learner.step(batch)
                actors["actor.1"].backward = real
                unchanged = all(torch.equal(held[r][n], t) for r, e in actors.items() for n, t in weights(e).items())
                rows.append({"case": [stage, dtype, bool(extra)], "culprit": report.culprit, "unchanged": unchanged})
                # And a score that is not finite ends the step before any backward of its micro-step.
                with torch.no_grad():
                    norm = actors["actor.0"].scorer.lm.model.norm
                real_forward, norm.forward = norm.forward, lambda x: x * float("nan")
                rows[-1]["culprit_score"] = learner.step(batch).culprit
                norm.forward = real_forward
                rows[-1]["unchanged"] &= all(
                    torch.equal(held[r][n], t) for r, e in actors.items() for n, t in weights(e).items()
                )
            learner.step(batch)
            results.append({role: weights(e) for role, e in actors.items()})
        rows[-1]["same_after"] = all(torch.equal(results[0][r][n], results[1][r][n]) for r in results[0] for n in results[0][r])
    return rows


def export_cases(cluster, folder: Path) -> list[dict]:
    """After a step, what is exported is what the engine scores with; an untied head is there, a tied one once."""
    from safetensors import safe_open
    from transformers import AutoModelForCausalLM

    rows, texts = [], [[3 + 5 * k % 300 for k in range(20)], [7 + 3 * k % 300 for k in range(12)]]
    for stage, tied in itertools.product((1, 2, 3), (False, True)):
        actors = build([tiny_lm(50, tied=tied, scale=2.0)], stage=stage, optimizer="AdamW", rate=1e-2)
        engine = actors["actor.0"]
        before = weights(engine)
        MadpoLearner(cluster, list(actors), ETA).step(random_pairs(1, 4, False, 2))
        target = folder / f"export-{stage}-{tied}"
        engine.save_pretrained(target)
        lm, info = AutoModelForCausalLM.from_pretrained(target, output_loading_info=True, dtype=torch.float32)
        with torch.no_grad():
            z = [lm(torch.tensor([t])).logits[0].log_softmax(-1) for t in texts]
        reference = [[float(y[k, t[k + 1]]) for k in range(len(t) - 1)] for y, t in zip(z, texts)]
        gap = max(abs(a - b) for p, q in zip(engine.token_logprobs(texts), reference) for a, b in zip(p, q))
        with safe_open(target / "model.safetensors", "pt") as f:
            names = set(f.keys())
        rows.append(
            {
                "case": [stage, tied], "gap": gap, "head": "lm_head.weight" in names, "use_cache": lm.config.use_cache,
                "odd_keys": sorted([*info["missing_keys"], *info["unexpected_keys"]]),
                "head_moved": "lm_head.weight" in before and not torch.equal(before["lm_head.weight"], lm.lm_head.weight),
            }
        )  # fmt: skip
    return rows


def file_cases(cluster) -> dict[str, list[float]]:
    """Every file of ds_configs/ builds an engine that learns: loss before and after one step."""
    losses = {}
    for file in sorted((Path(__file__).parents[2] / "ds_configs").glob("*.json")):
        config = json.loads(file.read_text())
        plan = plan_engine(config, TrainerNumbers(4, 1, 1e-2, 1.0, "auto", "bfloat16"))
        lm = tiny_lm(70, scale=2.0).to(getattr(torch, plan.dtype))
        cluster.create({"actor.0": call(make_engine, lm, plan, "auto")})
        cluster.local("actor.0").start_schedule(40)
        learner = MadpoLearner(cluster, ["actor.0"], ETA)
        batch = random_pairs(1, 4, False, 3)
        losses[file.name] = [learner.step(batch).loss for _ in range(6)]
    return losses


def other_cases(cluster) -> dict:
    lms = [tiny_lm(30, scale=2.0)]
    batch = random_pairs(1, 4, False, 1)
    # fp32 masters: steps far below bf16's resolution add up.
    from deepspeed.utils import safe_get_full_fp32_param

    moved = {}
    for stage in (1, 2, 3):
        actors = build(lms, stage=stage, dtype="bfloat16", optimizer="AdamW", rate=1e-6)
        engine = actors["actor.0"]
        p = next(p for n, p in engine.scorer.named_parameters() if "q_proj" in n)
        start = safe_get_full_fp32_param(p).clone()
        learner = MadpoLearner(cluster, list(actors), ETA)
        for _ in range(3):
            learner.step(batch)
        moved[stage] = [float((safe_get_full_fp32_param(p) - start).abs().mean()), str(safe_get_full_fp32_param(p).dtype)]
    # The schedule of the file, its total known only after the collection.
    schedule = {"type": "WarmupDecayLR", "params": {"total_num_steps": "auto", "warmup_num_steps": 2, "warmup_max_lr": "auto",
                                                    "warmup_min_lr": 0, "warmup_type": "linear"}}  # fmt: skip
    actors = build(lms, stage=2, optimizer="AdamW", rate=1e-3, extra={"scheduler": schedule})
    actors["actor.0"].start_schedule(6)
    learner = MadpoLearner(cluster, list(actors), ETA)
    rates = [learner.step(batch).learning_rates[0] for _ in range(6)]
    # Clipping: SGD moves by lr · g · min(1, c / ‖g‖).
    lengths = {}
    for clip in (None, 1e-3):
        actors = build(lms, stage=2, rate=RATE, clip=clip)
        before = weights(actors["actor.0"])
        report = MadpoLearner(cluster, list(actors), ETA).step(batch)
        after = weights(actors["actor.0"])
        lengths[str(clip)] = [
            float(sum(((before[n] - after[n]) ** 2).sum() for n in after) ** 0.5) / RATE,
            report.grad_norms[0],
        ]
    # Two passes and gradient checkpointing give the same weights as one pass.
    passes = []
    for margin_pass, checkpointing in (("one_forward", False), ("two_pass", False), ("one_forward", True)):
        lm = copy.deepcopy(lms[0])
        if checkpointing:
            lm.gradient_checkpointing_enable({"use_reentrant": False})
        actors = build([lm], stage=2, rate=1.0)
        MadpoLearner(cluster, list(actors), ETA, max_tokens=60, margin_pass=margin_pass).step(batch)
        passes.append(weights(actors["actor.0"]))
    differences = [relative(p, passes[0]) for p in passes[1:]]
    return {"masters": moved, "rates": rates, "clip": lengths, "passes": differences}


def main() -> None:
    cluster = join()
    places = {f"actor.{i}": RolePlace("all") for i in range(3)}
    layout = Layout(tuple(slots_of_one_host(1)), {"all": (0,)}, places, RolloutPlace(("all",)))
    cluster.arrange(layout, 1800, Path(sys.argv[1]))
    cluster.join_groups("cpu")
    result = {"gradients": gradient_cases(cluster), "skips": skip_cases(cluster), "other": other_cases(cluster)}
    result["files"] = file_cases(cluster)
    result["exports"] = export_cases(cluster, Path(sys.argv[1]))
    Path(sys.argv[1], "result.json").write_text(json.dumps(result))


if __name__ == "__main__":
    main()
