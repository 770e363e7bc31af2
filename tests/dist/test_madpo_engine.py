"""The joint step through real DeepSpeed engines, started by the real launcher; one launch for all cases."""

from __future__ import annotations

import pytest

from launch import run_worker


@pytest.fixture(scope="module")
def result(tmp_path_factory):
    return run_worker("madpo_worker.py", tmp_path_factory.mktemp("madpo"))


def test_gradient_equals_the_two_pass_reference(result):
    """Relative L2 error of every agent's whole gradient, fp32, ZeRO 1, 2 and 3."""
    rows = result["gradients"]
    assert {r["case"][0] for r in rows} == {1, 2, 3} and {r["case"][4] for r in rows} == {1, 2, 3}
    assert any(r["micro_steps"] > 1 for r in rows) and any(r["micro_steps"] == 1 for r in rows)
    for row in rows:
        assert max(row["errors"]) < 1e-5, row
        assert max(row["norms"]) < 1e-5, row
        assert row["loss"] < 1e-6, row


def test_a_nonfinite_step_changes_no_agent(result):
    for row in result["skips"]:
        assert row["culprit"] == [1, None], row
        assert row["culprit_score"][0] == 0, row
        assert row["unchanged"] and row["same_after"], row


def test_masters_are_fp32_at_every_stage(result):
    """Three AdamW steps of 1e-6 move weights by about 3e-6, far below the spacing of bf16 at their size."""
    for mean, dtype in result["other"]["masters"].values():
        assert dtype == "torch.float32"
        assert 2e-6 < mean < 4e-6


def test_schedule_follows_the_file(result):
    """DeepSpeed's WarmupDecayLR: rate 0 before its first step, then min(t/2, (6−t)/4) of the maximum at its t = 0, 1 …"""
    expected = [0.0, 0.0, 0.5e-3, 1e-3, 0.75e-3, 0.5e-3]
    assert result["other"]["rates"] == pytest.approx(expected, abs=1e-9)


def test_clipping_shortens_the_step_and_reports_the_whole_norm(result):
    free, clipped = result["other"]["clip"]["None"], result["other"]["clip"]["0.001"]
    assert free[0] == pytest.approx(free[1], rel=1e-4)
    assert clipped[0] == pytest.approx(1e-3, rel=1e-3)
    assert clipped[1] == pytest.approx(free[1], rel=1e-5)


def test_two_pass_and_checkpointing_give_the_same_step(result):
    assert max(result["other"]["passes"]) < 1e-6


def test_exports_load_in_transformers_with_the_engines_weights(result):
    """At every stage; `lm_head` is exported where it is a parameter of its own, and it has learned."""
    assert len(result["exports"]) == 6
    for row in result["exports"]:
        tied = row["case"][1]
        assert row["gap"] < 1e-5 and row["use_cache"] and row["odd_keys"] == [], row
        assert row["head"] is not tied and row["head_moved"] is not tied, row


def test_every_file_of_ds_configs_trains(result):
    """bf16.json warms its rate up from 0, so its first two steps change nothing."""
    assert len(result["files"]) == 7
    for name, losses in result["files"].items():
        assert losses[-1] < losses[0], (name, losses)
        assert (losses[2] == losses[0]) == (name == "bf16.json"), (name, losses)
