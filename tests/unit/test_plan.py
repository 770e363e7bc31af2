"""`plan`: who sits where, what fits, and all problems at once, without torch."""

from __future__ import annotations

import io
import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from rich.console import Console
from run_files import problems, written
from test_estimate import LLAMA_70B

from comlrl_ds.config import ConfigError, load_run_file
from comlrl_ds.planning import estimate, plan
from comlrl_ds.planning.model_shapes import shape_of_config, shape_of_model
from comlrl_ds.planning.plan import parse_devices, plan_run
from comlrl_ds.planning.task_check import check_task

GB = 10**9
TEAM = """
trainer: madpo
agents: [{model: %s}, {model: %s}]
task: {dataset: comlrl_ds.tasks.explain:train_items, reward_func: comlrl_ds.tasks.explain:reward}
"""


def planned(folder: Path, text: str, *overrides: str, **options):
    return plan_run(load_run_file(written(folder, text), list(overrides)), folder, **options)


def shown(made) -> str:
    text = io.StringIO()
    made.render(Console(width=140, file=text))
    return text.getvalue()


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch):
    monkeypatch.setattr(plan, "_sees_gpu", lambda: False)
    monkeypatch.setattr(plan, "_best_dtype", lambda kind: "float32" if kind == "cpu" else "bfloat16")


# --- whole plans
def test_one_process_on_a_cpu(tmp_path, model_folders):
    made = planned(tmp_path, TEAM % tuple(model_folders), "rollout.engines=2", "deepspeed={zero_optimization: {stage: 1}}")
    n = shape_of_model(model_folders[0]).parameters
    (row,) = made.memory
    assert row.memory.device["optimizer"] == 2 * 12 * n and row.memory.device["vLLM weights"] == 2 * 4 * n
    assert [(r.stage, r.dtype) for r in made.roles] == [(1, "float32")] * 2
    assert [(e.edge.agent, e.edge.engine.index, e.edge.transport) for e in made.edges] == [
        (0, 0, "host"), (0, 1, "host"), (1, 0, "host"), (1, 1, "host"),
    ]  # fmt: skip
    (host,) = made.hosts
    assert host.needed == row.memory.total + 3 * estimate.PROCESS_BYTES and host.fits == (host.needed <= 0.95 * host.has)
    assert "see host" in shown(made)


def test_graphs_of_a_group_count_together_only_if_all_are_kept(tmp_path, model_folders):
    text = TEAM % tuple(model_folders)
    parts = [
        planned(tmp_path, text, f"args.margin_pass={m}").memory[0].memory.device for m in ("one_forward", "two_pass", "auto")
    ]
    assert parts[0]["activations"] == 2 * parts[1]["activations"] == 2 * parts[2]["activations"] > 0


PLACED = """
placement:
  groups: {left: [0, 1], right: [2], samplers: [3, 4]}
  roles:
    actor.0: {group: left, deepspeed: {zero_optimization: {stage: 3}}}
    actor.1: right
    rollout: {group: samplers, tensor_parallel: 2}
"""


def test_groups_with_their_own_stages_and_what_fits(tmp_path):
    made = planned(tmp_path, TEAM % ("x-1B", "x-1B") + PLACED, devices="5x20GB")
    assert [(r.role, r.group, r.stage, r.deepspeed) for r in made.roles] == [
        ("actor.0", "left", 3, "in the run file"), ("actor.1", "right", 2, "default"),
    ]  # fmt: skip
    left, right, samplers = made.memory
    assert left.memory.device["weights"] == GB and right.memory.device["weights"] == 2 * GB
    assert samplers.memory.device == {"vLLM weights": GB, "KV cache": 9 * GB}
    # 18 bytes per parameter and a forward on one 20 GB device are too many; half of it on each of two is not.
    assert [m.fits for m in made.memory] == [True, False, True]
    # One engine, two agents: through host memory, on the same machine.
    assert [(e.edge.agent, e.edge.transport, e.size, e.seconds) for e in made.edges] == [
        (0, "host", 2 * GB, 4.0), (1, "host", 2 * GB, 4.0),
    ]  # fmt: skip
    text = shown(made)
    assert "NO" in text and "guessed from its name" in text and "not everything fits" in text and "samplers" in text
    assert all(m.fits for m in planned(tmp_path, TEAM % ("x-1B", "x-1B") + PLACED, devices="5x24GiB").memory)


def test_engines_that_do_not_fit_their_share(tmp_path):
    made = planned(tmp_path, TEAM % ("x-8B", "x-8B") + PLACED, "rollout.gpu_memory_utilization=0.3", devices="5x24GB")
    assert any("leaves an engine 7 GB, and its weights take 8 GB" in n for n in made.notes)
    assert made.memory[2].memory.device["KV cache"] == 0


def test_offloads_count_on_the_host(tmp_path):
    disk = "{device: nvme, nvme_path: /local}"
    ds = f"deepspeed={{zero_optimization: {{stage: 3, offload_optimizer: {{device: cpu}}, offload_param: {disk}}}}}"
    made = planned(tmp_path, TEAM % ("x-1B", "x-1B"), ds, devices="2x80GB")
    # Two actors, each 12 bytes per parameter over two ranks; two ranks and one engine on each. Engines and actors take turns:
    # 4 bytes per parameter of gradient sums, over two ranks, each actor's bucket of 500 million elements on each, and every
    # engine's 2 GB of weights wait on the host.
    waiting = 2 * 4 * GB + 2 * 2 * GB + 2 * 2 * GB
    assert made.hosts[0].needed == 2 * 12 * GB + waiting + 4 * estimate.PROCESS_BYTES and made.hosts[0].fits is None
    assert made.memory[0].memory.device["weights"] == made.memory[0].memory.device["optimizer"] == 0
    assert "actor.1: offload_param is on NVMe and in neither memory table" in made.notes


def test_an_unknown_size_leaves_question_marks(tmp_path):
    made = planned(tmp_path, TEAM % ("org/mystery", "x-1B"), devices="1x80GB")
    assert made.memory[0].fits is None and made.hosts[0].needed is None and made.edges[0].size is None
    text = shown(made)
    assert "?" in text and "org/mystery is not on this disk, and its name states no size" in text


# --- LoRA
LORA = """
trainer: marlhf
agents: [{model: %s, lora: {r: 4}}, {model: %s, lora: {target_modules: [q_proj, up_proj]}}]
task: {dataset: comlrl_ds.tasks.explain:train_items, reward_func: comlrl_ds.tasks.explain:reward}
args: {reference_kl_enabled: true, reward_lora: {r: 2, target_modules: [v_proj]}, rl_algorithm: maac}
"""
# Of the model folders: 64 hidden and 96 inner units, keys of 32, one block.
ALL_LINEAR = 2 * (64 + 64) + 2 * (64 + 32) + 3 * (64 + 96)


def test_adapters_learn_beside_a_base_that_a_rank_has_once(tmp_path, model_folders):
    ds = "deepspeed={zero_optimization: {stage: 1, reduce_bucket_size: 1}}"
    made = planned(tmp_path, LORA % (model_folders[0], model_folders[0]), ds)
    n = shape_of_model(model_folders[0]).parameters
    own = [4 * ALL_LINEAR, 8 * (64 + 64 + 64 + 96)]
    rows = {r.role: r for r in made.roles}
    assert rows.keys() == {"actor.0", "actor.1", "reward_model", "critic"}  # an adapter is its own reference
    assert [rows[f"actor.{i}"].learning.adapter for i in range(2)] == own
    # The vocabulary's head is untied here, and a scalar head stands in its place.
    backbone, head = n - 61 * 64, 65
    reward, critic = rows["reward_model"].learning, rows["critic"].learning
    assert (reward.trained, reward.fixed, reward.adapter) == (2 * (64 + 32) + head, backbone, 2 * (64 + 32))
    assert (critic.trained, critic.fixed, critic.adapter) == (backbone + head, 0, None)
    device = made.memory[0].memory.device
    learned = sum(own) + reward.trained + critic.trained
    assert device["optimizer"] == 12 * learned and device["gradients"] == 4 * (learned + 4)
    assert device["weights"] == 4 * (learned + n + backbone)
    assert sorted({(e.edge.agent, e.size) for e in made.edges}) == [(0, 4 * own[0]), (1, 4 * own[1])]
    text = shown(made)
    assert f"LoRA {own[0] / 1000:.3g}K" in text and "LoRA 192" in text
    sharded = planned(tmp_path, LORA % (model_folders[0], model_folders[0]), "deepspeed={zero_optimization: {stage: 3}}")
    assert sharded.memory[0].memory.device["weights"] == 4 * (learned + 2 * n + backbone)


def test_adapters_of_models_that_are_not_here(tmp_path):
    text = LORA.replace("{r: 4}", "{r: 4, target_modules: [odd]}") % ("org/x-8B", "org/x-8B")
    made = planned(tmp_path, text, "args.reward_model_name=org/x-1B", devices="1x80GB")
    rows = {r.role: r for r in made.roles}
    # As in a Llama of 8 billion: 32 blocks of 4096 hidden and 14336 inner units, with keys of a quarter.
    every = 32 * (2 * 2 * 4096 + 2 * (4096 + 1024) + 3 * (4096 + 14336))
    assert rows["actor.0"].learning.adapter == 4 * every  # no layer of that name is known
    assert rows["actor.1"].learning.adapter == 8 * 32 * (4096 + 4096 + 4096 + 14336)
    assert rows["reward_model"].model.parameters == 10**9 and rows["critic"].model.parameters == 8 * 10**9
    assert "about 8B (guess), LoRA" in " ".join(shown(made).split())


def test_an_agent_that_goes_on_from_an_adapter(tmp_path, model_folders):
    import torch
    from safetensors.torch import save_file

    adapter = tmp_path / "adapter"
    adapter.mkdir()
    (adapter / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": model_folders[0]}))
    save_file({"a": torch.zeros(3, 5), "b": torch.zeros(7, 3)}, adapter / "adapter_model.safetensors")
    text = LORA.replace(", lora: {r: 4}", "") % (adapter, model_folders[0])
    made = planned(tmp_path, text)
    n = shape_of_model(model_folders[0]).parameters
    first = made.roles[0]
    assert (first.learning.adapter, first.learning.fixed, first.model.parameters) == (36, n + 36, n)
    assert "reference.0" not in [r.role for r in made.roles]
    check_task(load_run_file(written(tmp_path, text), ["rollout.backend=transformers", "args.max_new_tokens=8"]), tmp_path)
    text = LORA.replace("{r: 4}", "{adapter: nowhere}").replace("{r: 2, target_modules: [v_proj]}", "{adapter: adapter}")
    found = problems(lambda: planned(tmp_path, text % tuple(model_folders)))
    assert found == {"agents.0.lora.adapter": "'nowhere' is no PEFT folder"}


def test_a_frozen_reward_backbone_trains_its_head(tmp_path, model_folders):
    text = LORA.replace("reward_lora: {r: 2, target_modules: [v_proj]}", "reward_freeze_backbone: true")
    made = planned(tmp_path, text % tuple(model_folders))
    (reward,) = [r for r in made.roles if r.role == "reward_model"]
    assert reward.learning.trained == 65 and reward.parameters.endswith("trained 65")


def test_layers_that_no_model_has(tmp_path, model_folders):
    text = LORA.replace("{r: 4}", "{target_modules: [qproj, q_proj, oproj]}").replace("[v_proj]", ".*query")
    found = problems(lambda: planned(tmp_path, text % tuple(model_folders), "args.critic_lora={target_modules: [lm_head]}"))
    ends = "q_proj, k_proj, v_proj, o_proj"
    assert found.keys() == {
        "agents.0.lora.target_modules",
        "args.reward_lora.target_modules",
        "args.critic_lora.target_modules",
    }
    assert found["agents.0.lora.target_modules"].startswith(
        f"'qproj', 'oproj' name no layer of {model_folders[0]}; layers end in "
    )
    assert sorted(found["args.reward_lora.target_modules"].rpartition("end in ")[2].split(", ")) == sorted(
        [*ends.split(", "), "gate_proj", "up_proj", "down_proj"]
    )


def test_whole_weights_are_not_sent_of_adapters(tmp_path, model_folders):
    found = problems(lambda: planned(tmp_path, LORA % tuple(model_folders), "rollout.transport=nccl", devices="2x80GB"))
    assert "sends whole weights, and an agent has lora" in found["rollout.transport"]


def test_agents_of_different_architectures_have_engines_of_their_own(tmp_path):
    made = planned(tmp_path, TEAM % ("x-1B", "x-3B"), devices="1x80GB")
    assert [(e.edge.agent, e.edge.engine.index, e.size) for e in made.edges] == [(0, 0, 2 * GB), (1, 1, 6 * GB)]


def four_70b(folder: Path, ds: dict) -> Path:
    (folder / "m").mkdir(exist_ok=True)
    (folder / "m" / "config.json").write_text(json.dumps(LLAMA_70B))
    groups = {f"g{i}": {f"n{2 * i + k}": list(range(8)) for k in range(2)} for i in range(4)}
    roles = {f"actor.{i}": f"g{i}" for i in range(4)} | {"rollout": {"group": list(groups), "tensor_parallel": 8}}
    content = yaml.safe_load(TEAM % ("m", "m")) | {
        "agents": [{"model": "m"}] * 4, "args": {"gradient_checkpointing": True}, "deepspeed": ds,
        "placement": {"groups": groups, "roles": roles},
    }  # fmt: skip
    (folder / "hosts").write_text("".join(f"n{k} slots=8\n" for k in range(8)))
    return written(folder, yaml.safe_dump(content))


def test_four_agents_of_70b_on_64_devices(tmp_path):
    n = shape_of_config(LLAMA_70B).parameters
    for offload, fits in (({}, False), ({"offload_optimizer": {"device": "cpu"}}, True)):
        run_file = load_run_file(four_70b(tmp_path, {"zero_optimization": {"stage": 3} | offload}))
        made = plan_run(run_file, tmp_path, hostfile=tmp_path / "hosts", devices="64x80GB")
        assert [len(r) for r in made.layout.groups.values()] == [16] * 4 and len(made.engines) == 8
        assert {(e.edge.agent, e.edge.transport) for e in made.edges} == {(i, "ipc") for i in range(4)} and len(made.edges) == 8
        device = made.memory[0].memory.device
        assert device["weights"] == 2 * n // 16 and device["optimizer"] == (0 if offload else 12 * n // 16)
        assert device["vLLM weights"] + device["KV cache"] == 40 * GB
        assert [m.fits for m in made.memory] == [fits] * 4 and any("take turns" in note for note in made.notes)
        # Engines and actors take turns on the devices: who does not work waits on the host.
        sizes = 8 * (4 * n // 16 + GB + 2 * n // 16 + 12 * n // 16 + 2 * n // 8)
        assert made.hosts[0].needed == sizes + 9 * estimate.PROCESS_BYTES
    assert "n0 … n7 (8)" in shown(made) and "g3" in shown(made)
    # Many edges are a line for each agent and group: here four agents, through the host, to engines near and far.
    run_file.rollout.transport = "host"
    made = plan_run(run_file, tmp_path, hostfile=tmp_path / "hosts", devices="8x80GB")
    assert len(made.edges) == 32 and all(
        math.isclose(e.seconds, 2 * n / (0.5e9 if e.same_host else 0.25e9)) for e in made.edges
    )
    assert shown(made).count("2 engines of g") == 12 and shown(made).count("│ host between machines │") == 16


def test_row_33_every_problem_at_once(tmp_path):
    """Two groups claim a rank, a role has no group, 2 does not divide 3: one line each, and what DeepSpeed would refuse."""
    text = """
deepspeed: {zero_optimization: {stage: 7}}
placement:
  groups: {left: [0, 1], right: [1, 2], samplers: [3, 4, 5]}
  roles:
    actor.0: {group: left, deepspeed: {train_batch_size: 5, train_micro_batch_size_per_gpu: 1, bf16: 3}}
    rollout: {group: samplers, tensor_parallel: 2}
args: {agent_devices: [right, auto]}
"""
    with pytest.raises(ConfigError) as caught:
        planned(tmp_path, TEAM % ("x-1B", "x-1B") + text)
    found = {p.path: p.message for p in caught.value.problems}
    assert found == {
        "placement.groups.right": "rank 1 is in 'left' too; groups must not overlap: leave it to one of the two",
        "placement.roles.actor.1": "no group; write actor.1: {group: …} with one of left, right, samplers",
        "placement.roles.rollout.tensor_parallel": "2 does not divide the 3 ranks of the group 'samplers'; write one of 1, 3",
        "args.agent_devices.0": "'right' contradicts placement.roles, where actor.0 has the group 'left'; keep one",
        "placement.roles.actor.0.deepspeed.bf16": "must be an object, got 3",
        "deepspeed.zero_optimization.stage": "7 is not 0, 1, 2 or 3",
    }
    assert len(caught.value.problems) == len(found)
    both = "deepspeed={zero_optimization: {stage: 7}}"
    with pytest.raises(ConfigError) as caught:
        planned(tmp_path, TEAM % ("x-1B", "x-1B"), both)
    assert len(caught.value.problems) == 1  # though two actors have it


def test_deepspeed_files_are_checked_with_the_size_of_the_group(tmp_path):
    own = "placement.roles.actor.0.deepspeed={train_micro_batch_size_per_gpu: 1, gradient_accumulation_steps: 1}"
    text = TEAM % ("x-1B", "x-1B") + PLACED
    assert planned(tmp_path, text.replace("{zero_optimization: {stage: 3}}", "{train_micro_batch_size_per_gpu: 1}")).roles
    text = text.replace("{zero_optimization: {stage: 3}}", own.partition("=")[2])
    found = problems(lambda: planned(tmp_path, text, "args.train_batch_size=3"))
    assert found.keys() == {"placement.roles.actor.0.deepspeed.train_micro_batch_size_per_gpu"}
    assert planned(tmp_path, text, "args.train_batch_size=2").roles
    # Without a group no number of ranks is known, and nothing is said of it.
    gone = text.replace("group: left", "group: lift")
    assert problems(lambda: planned(tmp_path, gone, "args.train_batch_size=3")).keys() == {"placement.roles.actor.0.group"}
    missing = problems(lambda: planned(tmp_path, TEAM % ("x-1B", "x-1B"), devices="1x1GB", hostfile=tmp_path / "none"))
    assert missing.keys() == {"--hostfile"}


def test_a_transport_that_the_placement_rules_out(tmp_path):
    found = problems(lambda: planned(tmp_path, TEAM % ("x-1B", "x-1B"), "rollout.transport=nccl", devices="2x80GB"))
    assert found.keys() == {"rollout.transport"}


def test_a_rank_that_nobody_can_mean(tmp_path):
    text = TEAM % ("x-1B", "x-1B") + "placement: {groups: {all: [0, 123456789]}, roles: {actor: all}}"
    found = problems(lambda: planned(tmp_path, text))
    assert "rank 123456789: the launch has 65536 ranks" in found["placement.groups.all"]


def test_engines_of_transformers_set_no_cache_aside(tmp_path):
    made = planned(tmp_path, TEAM % ("x-1B", "x-1B"), "rollout.backend=transformers")
    assert made.memory[0].memory.device["KV cache"] == 0 < made.memory[0].memory.device["vLLM weights"]


def test_the_device_of_this_machine(tmp_path, monkeypatch):
    """The driver's own tool is asked, of which there is none here: a stand-in answers."""
    monkeypatch.undo()
    tool = tmp_path / "bin" / "nvidia-smi"
    tool.parent.mkdir()
    tool.write_text("#!/bin/sh\nprintf '81559\\n80000\\n'\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tool.parent), prepend=os.pathsep)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    made = planned(tmp_path, TEAM % ("x-1B", "x-1B"))
    assert (made.device_kind, made.device_bytes, made.roles[0].dtype) == ("cuda", 80000 * 2**20, "bfloat16")
    assert made.hosts[0].has
    tool.write_text("#!/bin/sh\nexit 9\n")
    made = planned(tmp_path, TEAM % ("x-1B", "x-1B"))
    assert made.device_bytes is None and made.memory[0].fits is None
    cells = [[c.strip() for c in line.split("│")] for line in shown(made).splitlines() if line.endswith("│ ?    │")]
    assert [c[7] for c in cells if c[1] == "all"] == ["?"]  # how much cache an engine would take is not known
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert planned(tmp_path, TEAM % ("x-1B", "x-1B")).device_kind == "cpu"


def test_devices():
    assert parse_devices("4x80GB") == (4, 80 * GB) and parse_devices(" 1 x 1.5gib") == (1, 3 * 2**29)
    for text in ("4x80", "80GB", "0x80GB", "4x0GB", "fourx80GB", "4x80TB", ""):
        assert "write devices x memory, e.g. 4x80GB" in problems(lambda text=text: parse_devices(text))["--devices"]


def test_devices_beside_a_hostfile_count_for_each_host_or_in_all(tmp_path):
    (tmp_path / "hosts").write_text("a slots=2\nb slots=2\n")
    for devices in ("2x80GB", "4x80GB"):
        made = planned(tmp_path, TEAM % ("x-1B", "x-1B"), hostfile=tmp_path / "hosts", devices=devices)
        assert made.layout.hosts == ["a", "b"] and made.layout.groups == {"all": (0, 1, 2, 3)}
    found = problems(lambda: planned(tmp_path, TEAM % ("x-1B", "x-1B"), hostfile=tmp_path / "hosts", devices="3x80GB"))
    assert found == {"--devices": "'3x80GB', but the hostfile has 4 slots; write 4x…"}


def test_planning_imports_nothing_heavy(tmp_path):
    file = four_70b(tmp_path, {"zero_optimization": {"stage": 3}})
    script = f"""
import sys
from pathlib import Path
from rich.console import Console
from comlrl_ds.planning.plan import plan_run
from comlrl_ds.config import ConfigError, load_run_file
base = Path({str(tmp_path)!r})
plan_run(load_run_file({str(file)!r}), base, hostfile=base / "hosts", devices="8x80GB").render(Console())
print("loaded:", *sorted({{"torch", "transformers", "deepspeed", "vllm"}} & sys.modules.keys()), "end")
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert done.stdout.splitlines()[-1:] == ["loaded: end"], done.stdout + done.stderr
