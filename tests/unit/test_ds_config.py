"""A user's DeepSpeed file together with the trainer's numbers: filled in, agreed with, or contradicted by name."""

from __future__ import annotations

import copy
import json
from dataclasses import replace
from pathlib import Path

import pytest

from comlrl_ds.config import ConfigError
from comlrl_ds.engines.ds_config import TrainerNumbers, fill_hidden_size, plan_engine, read_deepspeed

FILES = sorted((Path(__file__).parents[2] / "ds_configs").glob("*.json"))
NUMBERS = TrainerNumbers(
    batch_size=8, world_size=2, learning_rate=1e-5, max_grad_norm=1.0, dtype="auto", default_dtype="float32"
)  # fmt: skip


def problems(user, numbers=NUMBERS) -> dict[str, str]:
    with pytest.raises(ConfigError) as caught:
        plan_engine(user, numbers)
    return {p.path: p.message for p in caught.value.problems}


def autos(value) -> bool:
    return value == "auto" or (isinstance(value, dict) and any(map(autos, value.values())))


# --- the files that come with the product
@pytest.mark.parametrize("file", FILES, ids=lambda f: f.stem)
@pytest.mark.parametrize("default", ["float32", "bfloat16"])
def test_every_file_resolves(file, default):
    user = read_deepspeed(file)
    plan = plan_engine(user, replace(NUMBERS, default_dtype=default))
    fill_hidden_size(plan.config, 64)
    assert plan.stage == json.loads(file.read_text())["zero_optimization"]["stage"]
    assert plan.dtype == {"bf16": "bfloat16", "fp32": "float32"}.get(file.stem, default)
    assert not autos(plan.config)
    # Optimizer and scheduler are built by us, with fp32 masters; DeepSpeed must not see them twice.
    assert not {"optimizer", "scheduler"} & plan.config.keys()
    assert plan.optimizer["params"]["lr"] == 1e-5
    assert plan.config["gradient_clipping"] == 1.0
    assert plan.config["bf16"]["enabled"] is (plan.dtype == "bfloat16") if "bf16" in plan.config else plan.dtype == "float32"
    assert plan.config["train_batch_size"] == 2
    assert user == json.loads(file.read_text())


def test_there_is_a_file_for_every_stage():
    assert {"zero1", "zero2", "zero3", "zero2_offload", "zero3_offload"} <= {f.stem for f in FILES}


# --- reading
def test_reading(tmp_path):
    content = {"zero_optimization": {"stage": 3}}
    (tmp_path / "ds.json").write_text(json.dumps(content))
    assert read_deepspeed(tmp_path / "ds.json") == content
    assert read_deepspeed("ds.json", tmp_path) == content
    read = read_deepspeed(content)
    read["zero_optimization"]["stage"] = 1
    assert content["zero_optimization"]["stage"] == 3
    assert read_deepspeed(None)["zero_optimization"]["stage"] == 2
    read_deepspeed(None)["zero_optimization"]["stage"] = 1
    assert read_deepspeed(None)["zero_optimization"]["stage"] == 2


@pytest.mark.parametrize(("content", "part"), [("{", "is not JSON"), ("[1]", "must hold a JSON object")])
def test_files_that_cannot_be_read(tmp_path, content, part):
    (tmp_path / "ds.json").write_text(content)
    with pytest.raises(ConfigError, match=part):
        read_deepspeed("ds.json", tmp_path)
    with pytest.raises(ConfigError, match=r"no file 'other.json'"):
        read_deepspeed("other.json", tmp_path)


# --- contradictions
@pytest.mark.parametrize(
    ("user", "path", "part"),
    [
        ({"train_batch_size": 16}, "train_batch_size", "16 contradicts args.train_batch_size = 8"),
        (
            {"optimizer": {"type": "AdamW", "params": {"lr": 1e-4}}},
            "optimizer.params.lr",
            "0.0001 contradicts args.agent_learning_rate = 1e-05",
        ),
        ({"gradient_clipping": 0.5}, "gradient_clipping", "0.5 contradicts args.max_grad_norm = 1.0"),
        ({"bf16": {"enabled": True}, "fp16": {"enabled": True}}, "fp16", "both enabled; keep one"),
        ({"gradient_accumulation_steps": 3}, "gradient_accumulation_steps", "3 on 2 ranks does not divide 8"),
        (
            {"gradient_accumulation_steps": 2, "train_micro_batch_size_per_gpu": 4},
            "train_micro_batch_size_per_gpu",
            "4 × 2 accumulation steps × 2 ranks is not args.train_batch_size = 8",
        ),
        ({"zero_optimization": {"stage": 4}}, "zero_optimization.stage", "is not 0, 1, 2 or 3"),
        ({"zero_optimization": {"stage": "two"}}, "zero_optimization.stage", "is not 0, 1, 2 or 3"),
        ({"zero_optimization": {"stage": 3, "overlap_comm": True}}, "zero_optimization.overlap_comm", "must be false"),
        ({"managed_gradient_accumulation": True}, "managed_gradient_accumulation", "must be false"),
        ({"optimizer": "AdamW"}, "optimizer", "must be {'type': name"),
        ({"scheduler": {"params": {}}}, "scheduler", "must be {'type': name"),
        ({"bf16": True}, "bf16", "must be an object"),
    ],
)
def test_contradictions_are_named(user, path, part):
    found = problems(user)
    assert found.keys() == {f"deepspeed.{path}"}
    assert part in found[f"deepspeed.{path}"]


@pytest.mark.parametrize(
    ("user", "dtype"),
    [
        ({"bf16": {"enabled": True}}, "float32"),
        ({"bf16": {"enabled": False}}, "bfloat16"),
        ({"fp16": {"enabled": True}}, "bfloat16"),
    ],
)
def test_a_compute_type_that_contradicts_the_trainers(user, dtype):
    messages = problems(user, replace(NUMBERS, dtype=dtype)).values()
    assert [f"but dtype is {dtype}" in message for message in messages] == [True]


def test_all_contradictions_are_found_at_once():
    user = {
        "train_batch_size": 3, "gradient_clipping": 9, "optimizer": {"type": "Adam", "params": {"lr": 1}},
        "bf16": {"enabled": True}, "fp16": {"enabled": True}, "zero_optimization": {"stage": 7}, "amp": {"level": "auto"},
    }  # fmt: skip
    assert problems(user).keys() == {
        f"deepspeed.{name}"
        for name in (
            "train_batch_size", "gradient_clipping", "optimizer.params.lr", "fp16", "zero_optimization.stage", "amp.level"
        )
    }  # fmt: skip


@pytest.mark.parametrize(
    "user",
    [
        {"zero_optimization": 2},
        {"zero_optimization": None},
        {"gradient_accumulation_steps": 0},
        {"gradient_accumulation_steps": "4"},
        {"train_micro_batch_size_per_gpu": 0},
        {"optimizer": {"type": "AdamW", "params": [1]}},
        {"data_types": "fp32"},
    ],
    ids=str,
)
def test_values_of_a_wrong_kind_are_named_not_crashed_on(user):
    (path,) = problems(user)
    assert path.startswith(f"deepspeed.{next(iter(user))}")


# --- batch sizes
@pytest.mark.parametrize(
    ("user", "max_pairs"),
    [
        ({}, None),
        ({"train_batch_size": 8}, None),
        ({"train_batch_size": "auto", "train_micro_batch_size_per_gpu": "auto", "gradient_accumulation_steps": "auto"}, None),
        # One micro-step holds micro pairs on each of the two ranks.
        ({"train_micro_batch_size_per_gpu": 2}, 4),
        ({"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 2}, 4),
        ({"train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 4, "train_batch_size": 8}, 2),
        ({"gradient_accumulation_steps": 4}, 2),
        ({"gradient_accumulation_steps": 1}, 8),
    ],
)
def test_micro_batches_accumulation_and_ranks_make_up_the_batch(user, max_pairs):
    plan = plan_engine(user, NUMBERS)
    assert plan.max_pairs == max_pairs
    names = ("train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "train_batch_size")
    assert [plan.config[n] for n in names] == [1, 1, 2]


# --- filling in
def test_stage_0_runs_as_stage_1_and_says_so():
    for user in ({}, {"zero_optimization": {"stage": 0}}):
        plan = plan_engine(user, NUMBERS)
        assert (plan.stage, plan.config["zero_optimization"]["stage"]) == (1, 1)
        assert any("stage 0 runs as stage 1" in note for note in plan.notes)
    assert plan_engine({"zero_optimization": {"stage": 1}}, NUMBERS).notes == ()


@pytest.mark.parametrize(
    ("user", "dtype", "default", "expected"),
    [
        ({}, "auto", "float32", "float32"),
        ({}, "auto", "bfloat16", "bfloat16"),
        ({}, "bfloat16", "float32", "bfloat16"),
        ({}, "float16", "float32", "float16"),
        ({}, "float32", "bfloat16", "float32"),
        ({"bf16": {"enabled": "auto"}}, "auto", "bfloat16", "bfloat16"),
        ({"bf16": {"enabled": "auto"}}, "float32", "bfloat16", "float32"),
        ({"bf16": {"enabled": True}}, "auto", "float32", "bfloat16"),
        ({"bf16": {"enabled": False}}, "auto", "bfloat16", "float32"),
        ({"fp16": {"enabled": True}}, "auto", "bfloat16", "float16"),
        ({"fp16": {"enabled": "auto"}}, "auto", "bfloat16", "bfloat16"),
        ({"bf16": {"enabled": "auto"}, "fp16": {"enabled": True, "loss_scale": 128}}, "auto", "bfloat16", "float16"),
    ],
)
def test_compute_types(user, dtype, default, expected):
    plan = plan_engine(user, replace(NUMBERS, dtype=dtype, default_dtype=default))
    assert plan.dtype == expected
    on = {name for name in ("bf16", "fp16") if plan.config.get(name, {}).get("enabled") is True}
    assert on == {"bfloat16": {"bf16"}, "float16": {"fp16"}, "float32": set()}[expected]
    assert not autos(plan.config)
    # Gradients of the micro-batches are summed in fp32 in any case.
    assert plan.config["data_types"]["grad_accum_dtype"] == "fp32"
    if "loss_scale" in user.get("fp16", {}):
        assert plan.config["fp16"]["loss_scale"] == 128


def test_clipping_follows_the_trainer_unless_only_the_file_has_it():
    without = replace(NUMBERS, max_grad_norm=None)
    assert plan_engine({}, without).config["gradient_clipping"] == 0.0
    assert plan_engine({"gradient_clipping": "auto"}, without).config["gradient_clipping"] == 0.0
    assert plan_engine({"gradient_clipping": 0.5}, without).config["gradient_clipping"] == 0.5
    assert plan_engine({"gradient_clipping": 1.0}, NUMBERS).config["gradient_clipping"] == 1.0


def test_the_optimizer_is_filled_in():
    assert plan_engine({}, NUMBERS).optimizer == {"type": "AdamW", "params": {"lr": 1e-5}}
    auto = {"type": "AdamW", "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"}}
    filled = plan_engine({"optimizer": auto}, NUMBERS).optimizer
    assert filled["params"] == {"lr": 1e-5, "betas": [0.9, 0.999], "eps": 1e-8, "weight_decay": 0.01}
    own = {"type": "SGD", "params": {"lr": 1e-5, "momentum": 0.9}}
    assert plan_engine({"optimizer": own}, NUMBERS).optimizer == own


def test_a_schedule_keeps_its_autos_until_the_number_of_steps_is_known():
    schedule = {"type": "WarmupLR", "params": {"warmup_max_lr": "auto", "warmup_num_steps": "auto"}}
    assert plan_engine({"scheduler": schedule}, NUMBERS).scheduler == schedule


def test_the_users_settings_are_kept_and_not_written_to():
    user = {"zero_optimization": {"stage": 3, "reduce_bucket_size": 123}, "steps_per_print": 7, "wall_clock_breakdown": False}
    before = copy.deepcopy(user)
    plan = plan_engine(user, NUMBERS)
    assert user == before
    assert plan.config["zero_optimization"]["reduce_bucket_size"] == 123
    assert (plan.config["steps_per_print"], plan.config["wall_clock_breakdown"]) == (7, False)


def test_buckets_follow_from_the_models_width():
    names = ("reduce_bucket_size", "stage3_prefetch_bucket_size", "stage3_param_persistence_threshold")
    plan = plan_engine({"zero_optimization": {"stage": 3} | dict.fromkeys(names, "auto")}, NUMBERS)
    fill_hidden_size(plan.config, 100)
    zero = plan.config["zero_optimization"]
    assert [zero[n] for n in names] == [10_000, 9_000, 1_000]
    kept = {"zero_optimization": {"reduce_bucket_size": 5}}
    fill_hidden_size(kept, 100)
    assert kept == {"zero_optimization": {"reduce_bucket_size": 5}}


# --- "auto" where nothing is known
@pytest.mark.parametrize(
    ("user", "path"),
    [
        ({"steps_per_print": "auto"}, "steps_per_print"),
        ({"amp": {"opt_level": "auto"}}, "amp.opt_level"),
        ({"optimizer": {"type": "AdamW", "params": {"momentum": "auto"}}}, "optimizer.params.momentum"),
        ({"zero_optimization": {"stage": 2, "allgather_bucket_size": "auto"}}, "zero_optimization.allgather_bucket_size"),
        ({"zero_optimization": {"stage": 3, "sub_group_size": "auto"}}, "zero_optimization.sub_group_size"),
        (
            {"zero_optimization": {"stage": 3, "stage3_max_live_parameters": "auto"}},
            "zero_optimization.stage3_max_live_parameters",
        ),
        ({"zero_optimization": {"stage": 2, "reduce_scatter": "auto"}}, "zero_optimization.reduce_scatter"),
        (
            {"zero_optimization": {"offload_optimizer": {"device": "auto"}}},
            "zero_optimization.offload_optimizer.device",
        ),
    ],
)
def test_an_auto_that_nobody_fills_in_is_refused(user, path):
    assert f"deepspeed.{path}" in problems(user)


def test_every_engine_swaps_into_a_folder_of_its_own():
    """DeepSpeed wipes its swap folder when an engine starts, and names files by rank only."""
    swap = {"device": "nvme", "nvme_path": "/fast/swap"}
    config = {"zero_optimization": {"stage": 3, "offload_optimizer": dict(swap), "offload_param": dict(swap)}}
    paths = set()
    for name in ("left-actor.0", "left-actor.1", "right-actor.2"):
        zero = plan_engine(config, TrainerNumbers(4, 2, 1e-5, None, "float32", "float32", name)).config["zero_optimization"]
        paths |= {zero[key]["nvme_path"] for key in ("offload_optimizer", "offload_param")}
        assert zero["offload_param"]["nvme_path"] == f"/fast/swap/{name}"
    assert len(paths) == 3
    del config["zero_optimization"]["offload_param"]["nvme_path"]
    with pytest.raises(ConfigError, match=r"offload_param.nvme_path: required with device nvme"):
        plan_engine(config, TrainerNumbers(4, 2, 1e-5, None, "float32", "float32", "x"))
