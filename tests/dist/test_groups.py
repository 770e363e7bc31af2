"""Actors in device groups: one launch of three ranks for all cases (group_worker.py)."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from comlrl_ds.config.errors import ConfigError
from comlrl_ds.engines.scalar import JointRewardModel
from comlrl_ds.trainers.export import export_policy
from launch import run_worker


@pytest.fixture(scope="module")
def result(tmp_path_factory):
    return run_worker("group_worker.py", tmp_path_factory.mktemp("groups"), ranks=3, timeout=900)


def test_gradient_equals_the_two_pass_reference(result):
    """Data parallel 2 and 1 at every stage, stages mixed between groups, more pairs than ranks and fewer."""
    rows = result["gradient_cases"]
    assert {r["left"] for r in rows} == {r["right"] for r in rows} == {1, 2, 3}
    assert any(r["micro_steps"] > 1 for r in rows) and any(r["micro_steps"] == 1 for r in rows)
    for row in rows:
        assert max(row["errors"]) < 1e-5 and max(row["norms"]) < 1e-5 and row["loss"] < 1e-5, row


def test_three_adamw_steps_equal_plain_torch(result):
    rows = result["three_steps"]
    assert any(r["micro_steps"] > 1 for r in rows) and any(r["micro_steps"] == 1 for r in rows)
    for row in rows:
        assert max(row["distances"]) < 1e-3, row


def test_reward_models_and_critics_get_the_gradient_of_plain_torch(result):
    """Bradley–Terry pairs and squared errors, on two ranks at every stage, more rows than ranks and fewer."""
    for row in result["scalar_cases"]:
        assert row["error"] < 1e-5 and row["loss"] < 1e-5, row


def test_a_saved_reward_model_says_the_same_and_is_nothing_without_its_head(result):
    """CASES 41: loaded in this process, one row at a time and padded on either side."""
    case = result["saved_reward_case"]
    model = JointRewardModel.from_pretrained(case["folder"]).eval()
    start = cases_of_the_start(case["rows"])
    with torch.no_grad():
        for row, value in zip(case["rows"], case["values"]):
            hidden = model.backbone(input_ids=torch.tensor([row]))[0][0, -1]
            assert float(model.head(hidden)) == pytest.approx(value, abs=1e-5)
            left = torch.tensor([[0, 0, *row]])
            mask = torch.tensor([[0, 0, *[1] * len(row)]])
            hidden = model.backbone(input_ids=left, attention_mask=mask, position_ids=(mask.cumsum(1) - 1).clamp(min=0))[0][
                0, -1
            ]
            assert float(model.head(hidden)) == pytest.approx(value, abs=1e-4)
    assert all(abs(a - b) > 1e-4 for a, b in zip(start, case["values"]))  # the step did something
    (Path(case["folder"]) / "scalar_head.safetensors").unlink()
    with pytest.raises(ConfigError, match="scalar_head"):
        JointRewardModel.from_pretrained(case["folder"])


def cases_of_the_start(rows):
    """Values before the step, by plain torch."""
    from group_cases import tiny_scalar

    model = tiny_scalar(71, hidden_dim=None).eval()
    with torch.no_grad():
        return [float(model.head(model.backbone(input_ids=torch.tensor([row]))[0][0, -1])) for row in rows]


def test_policy_gradients_are_those_of_plain_torch(result):
    """Odd and even numbers of samples; the agent that is frozen where there is one sample does not move at all."""
    rows = result["policy_gradient_cases"]
    assert any(r["micro_steps"] > 1 for r in rows) and any(r["micro_steps"] == 1 for r in rows)
    for row in rows:
        frozen = row["case"][2] == 1
        assert row["errors"][0] < 1e-5 and (row["errors"][1] == 0 if frozen else row["errors"][1] < 1e-5), row
        assert row["loss"] < 1e-4, row


def test_value_heads_and_importance_ratios_are_those_of_plain_torch(result):
    """Gradients of model and head, value loss (clipped) and gap to the engine; heads that read prompts, and whole rows."""
    rows = result["value_head_cases"]
    assert any(r["micro_steps"] > 1 for r in rows)
    for row in rows:
        assert max(row["errors"]) < 1e-5, row


def test_how_a_step_is_computed_does_not_change_it(result):
    assert max(result["same_step_cases"].values()) < 1e-4, result["same_step_cases"]


def test_an_infinite_gradient_on_one_rank_drops_the_step_everywhere(result):
    for row in result["skip_cases"]:
        assert row["culprit"] == [0, None] and row["unchanged"] and row["same_after"], row


def test_groups_take_different_numbers_of_steps_and_save(result):
    """CASES 53."""
    case = result["uneven_counts"]
    assert case["seconds"] < 90 and case["saved"]
    assert [len(losses) for losses in case["losses"].values()] == [3, 5]
    assert all(losses[-1] < losses[0] for losses in case["losses"].values())


def test_no_rank_ever_holds_a_whole_zero3_model(result):
    """CASES 57. The whole is what stands in the folder."""
    case = result["shard_case"]
    for held, whole in case["shards"]:
        assert abs(held / whole - 0.5) < 0.02
    assert case["partitioned"] and case["whole_at_load"] < 0.02 * case["shards"][0][1] and case["same"]


def test_weights_are_never_sent_from_inside_a_gather(result):
    """CASES 59, for buckets of one tensor, of some, and of everything."""
    one, some, everything = result["gather_case"]
    assert one["gathers"] == one["chunks"] > some["gathers"] > everything["gathers"] == everything["chunks"] == 1
    for row in result["gather_case"]:
        assert row["sends_in_gathers"] == 0 and row["same"], row


def test_policies_come_out_of_a_checkpoint_of_two_ranks(result):
    """In this one process; bit for bit what the engines write themselves, at ZeRO-3 and 1, in fp32 and bf16."""
    assert len(result["exported_case"]) == 4
    for run in map(Path, result["exported_case"]):
        for agent, name in ((0, "model.safetensors"), (2, "adapter_model.safetensors")):
            found = load_file(export_policy(run, agent, say=str) / name)
            wanted = load_file(run / "live" / f"actor.{agent}" / name)
            assert found.keys() == wanted.keys()
            assert all(found[n].dtype == t.dtype and torch.equal(found[n], t) for n, t in wanted.items()), run
        merged = export_policy(run, 2, merge=True, say=str)
        _, info = AutoModelForCausalLM.from_pretrained(merged, output_loading_info=True)
        assert not info["missing_keys"] and not info["unexpected_keys"]


def test_actors_of_two_groups_work_at_the_same_time(result):
    assert result["overlap_case"]["apart"] > 0.5
    assert result["overlap_case"]["together"] == 0.0
