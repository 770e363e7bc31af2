"""LoRA on both agents through the trainers, on a tiny model, in this process."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from marlhf_runs import rows, trainer
from peft import PeftModel
from safetensors.torch import load_file
from tasks_for_tests import items, letters, text
from tiny import save_tiny_model
from transformers import AutoModelForCausalLM

from comlrl_ds.cluster import call
from comlrl_ds.config.errors import ConfigError
from comlrl_ds.engines.engine import PolicyEngine
from comlrl_ds.engines.lora import lora_layers
from comlrl_ds.trainers.preference import (
    JointRewardModel,
    MADPOConfig,
    MADPOIterConfig,
    MADPOIterTrainer,
    MADPOTrainer,
)

LORA = {"r": 4, "lora_alpha": 16}
ADAPTER_ELEMENTS = 2 * 4 * ((64 + 64) * 2 + (64 + 32) * 2 + (64 + 128) * 3)  # two blocks: q and o, k and v, the MLP
ADAPTER_BYTES = 4 * ADAPTER_ELEMENTS + 14 * 4  # fp32, and a scaling for each layer
ARGS = {
    "num_agents": 2, "preference_num_candidates": 4, "preference_pairs_per_sample": 2, "max_new_tokens": 8, "temperature": 1.0,
    "top_p": 1.0, "top_k": None, "num_train_epochs": 1, "train_batch_size": 4, "agent_learning_rate": 3e-3, "eval_interval": 1,
    "eval_num_samples": 4, "gradient_checkpointing": True, "max_grad_norm": None,
}  # fmt: skip


def madpo(folder: Path, model: Path, *, rounds: bool = False, args=None, **arguments):
    kind, config = (MADPOIterTrainer, MADPOIterConfig) if rounds else (MADPOTrainer, MADPOConfig)
    given = {
        "agent_model": str(model), "train_dataset": items()[:5], "eval_dataset": items(), "reward_func": letters,
        "formatters": text, "run_dir": folder, "seed": 5, "verbose": False, "model_config": {"dtype": "float32"},
        "rollout": {"backend": "transformers", "max_model_len": 128}, "lora": LORA,
    }  # fmt: skip
    return kind(args=config(**(ARGS | (args or {}))), **(given | arguments))


ROWS = [[5, 6, 7, 8, 9, 10], [300, 2, 17]]


def live(t, agent: int, listed=None) -> list[list[float]]:
    """Log-probs of some rows by an actor."""
    role = t.session.actors[agent]
    return t.cluster.run({role: call(PolicyEngine.token_logprobs, listed or ROWS)})[role]


@torch.no_grad()
def plain(lm) -> list[list[float]]:
    scores = [lm(torch.tensor([row])).logits[0].log_softmax(-1) for row in ROWS]
    return [[float(z[k, row[k + 1]]) for k in range(len(row) - 1)] for z, row in zip(scores, ROWS)]


def flat(listed) -> list[float]:
    return [x for row in listed for x in row]


@pytest.fixture(scope="module")
def shot(tmp_path_factory, tiny_model):
    """A MADPO run, and what its actors say at the end."""
    folder = tmp_path_factory.mktemp("lora")
    with madpo(folder / "run", tiny_model) as t:
        t.train()
        said = [live(t, i) for i in range(2)]
        lms = [t.cluster.local(f"actor.{i}").scorer.lm for i in range(2)]
        shared = [
            a.base_layer.weight.data_ptr() == b.base_layer.weight.data_ptr()
            for a, b in zip(*(lora_layers(lm).values() for lm in lms))
        ]
        bases = {n: p.detach().clone() for n, p in lms[0].named_parameters() if "lora_" not in n}
        flags = {n: p.requires_grad for n, p in lms[1].named_parameters()}
    return folder / "run", said, shared, bases, flags


def test_only_adapters_learn_beside_one_base_for_both(shot, tiny_model):
    """CASES 39: with gradient checkpointing, too, lora_B leaves 0 and the gradient's norm is logged."""
    run, _, shared, bases, flags = shot
    assert len(shared) == 14 and all(shared)
    assert {n for n, on in flags.items() if on} == {n for n in flags if "lora_" in n} and len(flags) > 28
    start = load_file(tiny_model / "model.safetensors")
    for name, tensor in bases.items():
        assert torch.equal(tensor, start[name.replace(".base_layer", "")]), name
    for agent in range(2):
        state = load_file(run / f"final/agent_{agent}/adapter_model.safetensors")
        assert len(state) == 28 and all(x.abs().max() > 0 for n, x in state.items() if "lora_B" in n)
    assert all(row["train/grad_norm/agent_1"] > 0 for row in rows(run, "train/grad_norm/agent_1"))


def test_a_sync_carries_the_adapter_alone_and_the_engine_agrees(shot):
    run, *_ = shot
    sent = [row["rollout/sync_bytes"] for row in rows(run, "rollout/sync_bytes")]
    assert sent and set(sent) == {ADAPTER_BYTES}
    assert rows(run, "rollout/logprob_gap")[0]["rollout/logprob_gap"] < 1e-5


def test_what_is_saved_is_a_peft_folder(shot, tiny_model):
    run, said, *_ = shot
    for agent in range(2):
        lm = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(tiny_model), str(run / f"final/agent_{agent}"))
        assert flat(plain(lm)) == pytest.approx(flat(said[agent]), abs=1e-5)
        assert flat(plain(lm)) != pytest.approx(flat(plain(AutoModelForCausalLM.from_pretrained(tiny_model))), abs=1e-3)


def test_an_agent_goes_on_from_an_adapter_and_keeps_it_as_its_reference(shot, tiny_model, tmp_path):
    """Evaluated before anything is learned it is the run's last policy; the KL to it starts at 0, as W8 wants."""
    run, said, *_ = shot
    agents = [str(run / f"final/agent_{i}") for i in range(2)]
    args = {"reference_kl_enabled": True, "num_train_epochs": 1, "reward_lora": LORA}
    with trainer(tmp_path / "on", tiny_model, agent_model=None, agents=agents, args=args) as t:
        assert [s.adapter for s in t.lora] == agents and t.setup.sources == [str(tiny_model)] * 2
        before = t.evaluate()["eval/turn_1/reward_mean"]
        assert flat(live(t, 0)) == pytest.approx(flat(said[0]), abs=1e-6)
        t.train()
        assert t.session.others == ("reward_model",)  # no reference is loaded
        assert flat(live(t, 0)) != pytest.approx(flat(said[0]), abs=1e-3)
        assert all(p.requires_grad == (".default." in n) for n, p in t.cluster.local("actor.0").scorer.lm.named_parameters())
    kls = [row["turn_1/reference_kl_mean"] for row in rows(tmp_path / "on", "turn_1/reference_kl_mean")]
    assert abs(kls[0]) < 1e-9 and all(k > 1e-5 for k in kls[1:])
    ends = rows(run, "eval/turn_1/reward_mean")
    assert before == ends[-1]["eval/turn_1/reward_mean"] != ends[0]["eval/turn_1/reward_mean"]


def test_a_saved_reward_model_scores_as_it_did(tiny_model, tmp_path):
    with trainer(tmp_path / "run", tiny_model, args={"reward_lora": LORA, "reward_num_train_epochs": 3}) as t:
        t.train()
        engine = t.cluster.local("reward_model")
        said = engine.values(ROWS)
    model = JointRewardModel.from_pretrained(str(tmp_path / "run/final/reward_model")).eval()
    with torch.no_grad():
        for row, value in zip(ROWS, said):
            ids = torch.tensor([row])
            got = model(ids, torch.arange(len(row))[None], torch.tensor([len(row) - 1]))
            assert float(got) == pytest.approx(value, abs=1e-5)
    assert not list((tmp_path / "run/final/reward_model").glob("model*.safetensors"))


def test_rounds_compare_with_older_adapters(tiny_model, tmp_path):
    """Hashes say which weights were compared; a policy's folder holds its adapter alone, and drift is that of the whole."""
    args = {
        "num_iterations": 3,
        "comparator_policy": "history",
        "keep_policy_checkpoints": True,
        "comparator_num_candidates": 4,
    }
    with madpo(tmp_path / "run", tiny_model, rounds=True, args=args) as t:
        t.train()
        ends = [t.cluster.local(f"actor.{i}") for i in range(2)]
        moved = [_drift(engine, tiny_model) for engine in ends]
    found = rows(tmp_path / "run", "iter/comparator_weights/agent_0")
    own = [row["iter/weights/agent_0"] for row in found]
    assert len(set(own)) == 3 and [row["iter/comparator_weights/agent_0"] for row in found] == [own[0], own[0], own[1]]
    folder = tmp_path / "run/policy_checkpoints/iteration_0000/agent_0"
    assert (folder / "adapter_model.safetensors").is_file() and not (folder / "model.safetensors").exists()
    last = rows(tmp_path / "run", "iter/drift/agent_0")[-1]
    assert [last[f"iter/drift/agent_{i}"] for i in range(2)] == pytest.approx(moved, rel=1e-4)


@torch.no_grad()
def _drift(engine, model: Path) -> float:
    """‖θ − θ₀‖ / ‖θ₀‖ from whole weights."""
    old = dict(AutoModelForCausalLM.from_pretrained(model).named_parameters())
    moved = {f"{n}.weight": m.get_delta_weight("default") for n, m in lora_layers(engine.scorer.lm).items()}
    square = lambda tensors: sum(float(t.double().square().sum()) for t in tensors)  # noqa: E731
    return (square(moved.values()) / square(old.values())) ** 0.5


def test_a_checkpoint_holds_adapters_and_refuses_another_base(tiny_model, tmp_path):
    base = save_tiny_model(tmp_path / "base", 1)
    args = {"num_train_epochs": 3, "eval_interval": 0}
    with madpo(tmp_path / "whole", base, args=args) as t:
        t.train()
    with madpo(tmp_path / "run", base, args=args, checkpoint_interval=1) as t, pytest.raises(KeyboardInterrupt):
        _interrupt_after(t, 4)
        t.train()
    states = list((tmp_path / "run/checkpoints").rglob("actor.0/mp_rank*.pt"))
    assert states and all(f.stat().st_size < 6 * 4 * ADAPTER_ELEMENTS for f in states)
    kept = (base / "model.safetensors").read_bytes()
    save_tiny_model(base, 2)
    with (
        madpo(tmp_path / "run", base, args=args, resume="auto") as t,
        pytest.raises(ConfigError, match="other weights than when"),
    ):
        t.train()
    (base / "model.safetensors").write_bytes(kept)
    with madpo(tmp_path / "run", base, args=args, resume="auto") as t:
        t.train()
    for agent in range(2):
        one, other = (tmp_path / f"{name}/final/agent_{agent}/adapter_model.safetensors" for name in ("whole", "run"))
        assert one.read_bytes() == other.read_bytes()


def _interrupt_after(t, updates: int) -> None:
    """The run ends as by Ctrl-C in its step of that number."""
    real = t.reporter.step

    def step(*arguments):
        real(*arguments)
        if t.reporter.updates == updates:
            raise KeyboardInterrupt

    t.reporter.step = step


def test_what_cannot_work_is_said_at_once(tiny_model, tmp_path):
    for lora, message in [
        ({"rank": 4}, r"lora\.rank: unknown setting"),
        ([LORA], r"lora: 1 entries for 2 agents"),
        ({"adapter": str(tiny_model)}, r"lora\.adapter: .* is no PEFT folder"),
        ({"adapter": "x", "r": 4}, r"comes from the adapter"),
        ("r=4", r"write a mapping"),
    ]:
        with pytest.raises(ConfigError, match=message):
            madpo(tmp_path / "run", tiny_model, lora=lora)
    with pytest.raises(ConfigError, match=r"rollout\.transport: 'nccl' sends whole weights"):
        madpo(tmp_path / "run", tiny_model, rollout={"transport": "nccl"})
    (tmp_path / "odd").mkdir()
    (tmp_path / "odd/adapter_config.json").write_text(json.dumps({"peft_type": "LORA"}))
    with pytest.raises(ConfigError, match="does not say which model it is for"):
        madpo(tmp_path / "run", tiny_model, agent_model=str(tmp_path / "odd"), lora=None)
