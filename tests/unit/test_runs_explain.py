"""What a run leaves behind, the statistics that it prints, and the task that comes with the product."""

from __future__ import annotations

import json
import math
import statistics

import pytest
import torch
import yaml
from hypothesis import given
from hypothesis import strategies as st

from comlrl_ds.config import ConfigError, MADPOConfig
from comlrl_ds.learners.madpo import StepReport
from comlrl_ds.maths.packing import PairTokens
from comlrl_ds.preference.evaluation import Evaluation, mean_and_error
from comlrl_ds.preference.records import PreferencePair
from comlrl_ds.runs.display import Display
from comlrl_ds.runs.metrics import METRICS, Metrics, agent_metric
from comlrl_ds.runs.run_dir import RunDir
from comlrl_ds.runs.trackers import trackers_for
from comlrl_ds.tasks import explain
from comlrl_ds.trainers.preference.reporting import Reporter


# --- metrics
def lines(file):
    def refuse(name):
        raise AssertionError(f"{name} is no JSON")

    return [json.loads(line, parse_constant=refuse) for line in file.read_text().splitlines()]


def test_metrics_are_appended_with_their_place_in_the_run(tmp_path):
    metrics = Metrics(tmp_path / "m.jsonl")
    metrics.write(1, 8, {"train/loss": 0.5, agent_metric("train/margin", 1): -2.0})
    metrics.write(2, 16, {"eval/turn_1/reward_mean": 1.0, "eval/longest": 3})
    first, second = lines(tmp_path / "m.jsonl")
    assert (first.pop("time") > 1.6e9, first) == (
        True,
        {"update": 1, "env_step": 8, "train/loss": 0.5, "train/margin/agent_1": -2.0},
    )
    assert (second["update"], second["eval/longest"]) == (2, 3)


def test_values_that_are_not_finite_are_null(tmp_path):
    metrics = Metrics(tmp_path / "m.jsonl")
    metrics.write(1, 0, {"train/loss": math.nan, "train/joint_margin": -math.inf, agent_metric("train/grad_norm", 0): math.inf})
    (line,) = lines(tmp_path / "m.jsonl")
    assert [line[k] for k in ("train/loss", "train/joint_margin", "train/grad_norm/agent_0")] == [None, None, None]


@pytest.mark.parametrize(
    "name",
    ["train/los", "train/loss/agent_0", "train/margin", "train/margin/agent_x", "train/margin/3", "eval/", "loss", ""],
)
def test_an_undeclared_metric_is_refused(tmp_path, name):
    metrics = Metrics(tmp_path / "m.jsonl")
    with pytest.raises(KeyError, match="undeclared metric"):
        metrics.write(1, 0, {"train/loss": 1.0, name: 1.0})
    assert not (tmp_path / "m.jsonl").exists()


def test_every_metric_is_declared_with_unit_and_meaning():
    assert all(unit and meaning for unit, meaning in METRICS.values())


def test_trackers_get_values_by_environment_step(tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    assert trackers_for([], tmp_path) == []
    metrics = Metrics(None, trackers_for(["tensorboard"], tmp_path))
    metrics.track(12, {"train/loss": 0.25})
    metrics.close()
    read = EventAccumulator(str(tmp_path / "tensorboard"))
    read.Reload()
    assert [(e.step, e.value) for e in read.Scalars("train/loss")] == [(12, 0.25)]


# --- the run's folder
def test_a_folder_holds_one_run(tmp_path):
    run = RunDir(tmp_path / "runs" / "one")
    run.create({"trainer": "madpo", "run": {"seed": 3, "note": "é"}})
    assert yaml.safe_load((tmp_path / "runs" / "one" / "config.yaml").read_text()) == {
        "trainer": "madpo",
        "run": {"seed": 3, "note": "é"},
    }
    for again in (run.check, lambda: run.create({})):
        with pytest.raises(ConfigError, match=r"run\.dir: .*already holds a run; give another run\.dir"):
            again()
    assert "é" in (run.path / "config.yaml").read_text()


def test_an_empty_folder_may_be_used_and_a_file_may_not(tmp_path):
    (tmp_path / "empty").mkdir()
    RunDir(tmp_path / "empty").create({})
    (tmp_path / "file").write_text("x")
    with pytest.raises(ConfigError, match=r"run\.dir: .*is not a writable folder"):
        RunDir(tmp_path / "file" / "run").check()
    with pytest.raises(ConfigError, match=r"run\.dir"):
        RunDir(tmp_path / "file").check()


def test_places_are_absolute(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run = RunDir("out")
    monkeypatch.chdir("/")
    assert run.path == tmp_path / "out"
    assert run.metrics == tmp_path / "out" / "metrics.jsonl"
    assert run.journal(1).parent == run.replay == tmp_path / "out" / "preference_replay"
    assert not run.path.exists()
    monkeypatch.setenv("HOME", str(tmp_path))
    assert RunDir("~/here").path == tmp_path / "here"


# --- statistics
def test_mean_and_error():
    values = [1.0, 4.0, 2.5, -3.0]
    mean, error = mean_and_error(values)
    assert mean == pytest.approx(statistics.mean(values), abs=1e-15)
    assert error == pytest.approx(statistics.stdev(values) / 2, abs=1e-15)
    assert mean_and_error([5.0, 5.0]) == (5.0, 0.0)
    one, unknown = mean_and_error([3.0])
    assert (one, math.isnan(unknown)) == (3.0, True)
    assert all(map(math.isnan, mean_and_error([])))


def test_evaluations_average_over_tasks_not_over_samples():
    evaluation = Evaluation([4, 9], [[1.0, 1.0, 1.0], [5.0]])
    assert evaluation.item_means == [1.0, 5.0]
    assert (evaluation.mean, evaluation.standard_error) == (3.0, 2.0)


def test_a_gain_is_paired_by_task():
    before = Evaluation([1, 2, 3], [[0.0], [10.0], [5.0]])
    after = Evaluation([2, 3, 4], [[11.0, 13.0], [8.0], [99.0]])
    # Task 2 gained 2 and task 3 gained 3; tasks that only one of the two has do not count.
    gain, error = after.gain_over(before)
    assert gain == 2.5
    assert error == pytest.approx(statistics.stdev([2.0, 3.0]) / math.sqrt(2))
    # Unpaired errors of such different tasks would hide a gain that is the same everywhere.
    shifted = Evaluation([1, 2, 3], [[1.0], [11.0], [6.0]])
    assert shifted.gain_over(before) == (1.0, 0.0)
    assert before.standard_error > 2


def test_the_table_shows_means_and_the_paired_gain(capsys):
    before, after = Evaluation([1, 2], [[0.0], [2.0]]), Evaluation([1, 2], [[1.0], [4.0]])
    Display().reward_table([("before", before), ("after", after)])
    out = capsys.readouterr().out
    rows = {line.split("│")[1].strip(): [x.strip() for x in line.split("│")[2:4]] for line in out.splitlines() if "│" in line}
    assert rows == {"before": ["1.000", "1.000"], "after": ["2.500", "1.500"], "gain (paired)": ["+1.500", "0.500"]}
    Display(verbose=False).reward_table([("before", before)])
    assert capsys.readouterr().out == ""


# --- reports of steps
def a_pair(mean):
    return PreferencePair([], [], [], 1.0, 0.0, mean, [], None, None, (PairTokens([1], [2], [3]),) * 2, 7, 0, 1)


def a_report(culprit=None):
    return StepReport(
        loss=0.5, joint_margins=torch.tensor([2.0, -1.0, 0.0, 3.0]), margins=torch.tensor([[1.0, -1.0, 0.0, 2.0]] * 2),
        winner_logprobs=[-1.0, -2.0], loser_logprobs=[-3.0, -4.0], grad_norms=[0.1, 0.2], learning_rates=[1e-5, 2e-5],
        tokens=100, micro_steps=3, seconds=2.0, spans=[[(0.0, 1.0)], [(0.5, 1.5)]], culprit=culprit,
    )  # fmt: skip


def reporter_of(tmp_path, **settings):
    run = RunDir(tmp_path / "run")
    run.create({})
    return Reporter(MADPOConfig(**settings), run, Display()), run.metrics


def test_a_step_is_reported_as_the_page_says(tmp_path, capsys):
    reporter, file = reporter_of(tmp_path)
    reporter.step(a_report(), [a_pair(m) for m in (1.0, 2.0, 3.0, 6.0)])
    (line,) = lines(file)
    expected = {
        "update": 1, "env_step": 8, "train/loss": 0.5, "train/joint_margin": 1.0, "train/accuracy": 0.5, "train/step_s": 2.0,
        "train/tokens_per_s": 50.0, "train/micro_steps": 3, "turn_1/reward_mean": 3.0, "turn_1/expected_return": 3.0,
        "train/margin/agent_0": 0.5, "train/margin/agent_1": 0.5, "train/winner_logprob/agent_1": -2.0,
        "train/loser_logprob/agent_0": -3.0, "train/grad_norm/agent_1": 0.2, "train/lr/agent_1": 2e-5,
        "train/nonfinite_steps": 0,
    }  # fmt: skip
    assert {name: line[name] for name in expected} == pytest.approx(expected)


@pytest.mark.parametrize(
    ("settings", "env_steps", "shown"),
    [
        ({"logging_steps": 4}, [2, 4, 6, 8], [2, 4]),
        ({"logging_steps": 50}, [2, 4, 6, 8], []),
        ({"logging_steps": 4, "environment_steps_per_pair": 10}, [10, 20, 30, 40], [1, 2, 3, 4]),
        ({"logging_steps": 4, "use_environment_step": False}, [0, 0, 0, 0], [1, 2, 3, 4]),
    ],
)
def test_environment_steps_advance_by_pair_and_space_the_printed_lines(tmp_path, capsys, settings, env_steps, shown):
    reporter, file = reporter_of(tmp_path, **settings)
    for _ in range(4):
        reporter.step(a_report(), [a_pair(1.0)])
    assert [line["env_step"] for line in lines(file)] == env_steps
    printed = [int(text.split()[1].rstrip(":")) for text in capsys.readouterr().out.splitlines() if text.startswith("update")]
    assert printed == shown


def test_a_dropped_step_names_agent_pair_task_and_file(tmp_path, capsys):
    reporter, file = reporter_of(tmp_path)
    batch = [a_pair(1.0)] * 4
    for count, (culprit, wanted) in enumerate(
        [((1, 2), "non-finite log-probability of agent 1, pair 30 of round.json (task 7)"),
         ((0, None), "non-finite gradient of agent 0, pair 10, 20, 30, 40 of round.json (task 7)")], 1
    ):  # fmt: skip
        reporter.step(a_report(culprit), batch)
        assert reporter.nonfinite_steps == count
        assert wanted in reporter.nonfinite(a_report(culprit), batch, [10, 20, 30, 40], "round.json")
    assert [line["train/nonfinite_steps"] for line in lines(file)] == [1, 2]


# --- the explain task
def test_the_split_is_fixed_and_disjoint():
    train, held = explain.train_items(), explain.eval_items()
    ids = [item["task_id"] for item in train], [item["task_id"] for item in held]
    assert (len(train), len(held)) == (100, 64)
    assert not set(ids[0]) & set(ids[1])
    assert set(ids[0]) | set(ids[1]) == {f"HumanEval/{k}" for k in range(164)}
    # list(range(164)) shuffled by Random(164), whatever order the package lists its problems in.
    assert ids[1][:3] == ["HumanEval/153", "HumanEval/43", "HumanEval/120"]
    assert ids[0][:2] == ["HumanEval/81", "HumanEval/94"]
    assert train[0]["entry_point"] in train[0]["prompt"]
    train.clear()
    assert len(explain.train_items()) == 100


def test_each_agent_is_asked_in_chat_about_the_whole_prompt():
    item = explain.train_items()[0]
    asked = [formatter(item) for formatter in explain.formatters]
    assert [[m["role"] for m in messages] for messages in asked] == [["user"], ["user"]]
    assert all(messages[0]["content"].endswith(item["prompt"]) for messages in asked)
    assert asked[0] != asked[1]


def words(count, distinct, letter="a"):
    """A text of `count` words, `distinct` of them different."""
    names = [f"{letter}{chr(97 + k // 26)}{chr(97 + k % 26)}" for k in range(distinct)]
    return " ".join(names[k % distinct] for k in range(count))


def parts(summary, explanation):
    return explain.reward_parts(summary, explanation)


@pytest.mark.parametrize(
    ("short", "long", "size"),
    [(8, 8, 0.5), (7, 20, 0.0), (20, 7, 0.0), (256, 256, 0.5), (257, 20, 0.0), (20, 257, 0.0), (0, 20, 0.0)],
)
def test_size(short, long, size):
    assert parts(words(short, max(short, 1)), words(long, 5))["size"] == size


@pytest.mark.parametrize(
    ("length", "value"),
    [
        (20, 0.0), (21, 0.0), (22, 0.0), (27, 0.5), (32, 1.0), (48, 1.0), (64, 1.0), (73, 0.75), (82, 0.5), (91, 0.25),
        (100, 0.0), (101, 0.0), (200, 0.0),
    ],
)  # fmt: skip
def test_length_ratio_has_a_plateau_from_1_6_to_3_2(length, value):
    # A summary of 20 words: 22 words are q = 1.1, 32 are 1.6, 64 are 3.2 and 100 are 5.
    assert parts(words(20, 20), words(length, 10, "b"))["length_ratio"] == pytest.approx(value, abs=1e-12)


@pytest.mark.parametrize(("distinct", "value"), [(10, 0.0), (13, 0.0), (20, 0.5), (40, 0.5), (15, 0.5 * 0.2 / 0.7)])
def test_unique_ratio_by_distinct_words(distinct, value):
    # The summary has 10 distinct words in 20, so lengths play no part.
    assert parts(words(20, 10), words(40, distinct, "b"))["unique_ratio"] == pytest.approx(value, abs=1e-12)


@pytest.mark.parametrize(
    ("transitions", "categories"),
    [
        ("", 0), ("also", 1), ("also moreover", 1), ("ALSO, However", 2), ("because then", 2), ("therefore next example", 3),
        ("also but since finally such", 5), ("firstly buts", 0),
    ],
)  # fmt: skip
def test_style_counts_categories_of_transition_words(transitions, categories):
    text = f"{words(20, 20, 'b')} {transitions}"
    assert parts(words(20, 20), text)["style"] == pytest.approx(0.4 * min(1, categories / 3), abs=1e-12)
    # In the summary they count for nothing but the shared vocabulary.
    assert parts(f"{words(20, 20)} however", words(20, 20, "b"))["style"] == 0.0


@pytest.mark.parametrize(("shared", "value"), [(0, 0.0), (3, 0.6 * (3 / 17) / 0.3), (5, 0.6), (10, 0.6)])
def test_style_rewards_a_shared_vocabulary_up_to_a_jaccard_of_0_3(shared, value):
    # 10 words each, `shared` in common: J = shared / (20 − shared), 0.33 at 5.
    summary, text = words(10, 10), f"{words(shared, max(shared, 1))} {words(10 - shared, max(10 - shared, 1), 'b')}"
    assert parts(summary, text)["style"] == pytest.approx(value, abs=1e-12)


def test_a_whole_score_by_hand():
    summary = "Returns whether any two numbers are closer than a threshold."  # 10 words, all different
    explanation = (
        "The function first loops over the numbers, then compares any two numbers; because they are sorted, "
        "it stops early. For example, closer numbers than a threshold return True."
    )
    # 28 words: q = 2.8. Different: the function first loops over numbers then compares any two because they are sorted it
    # stops early for example closer than a threshold return true = 25: u = 2.5. Shared: any two numbers are closer than a
    # threshold = 8, so J = 8 / (10 + 25 − 8). Categories: order, cause, example.
    assert parts(summary, explanation) == pytest.approx(
        {"size": 0.5, "length_ratio": 1.0, "unique_ratio": 0.5, "style": 0.4 + 0.6 * min(1, (8 / 27) / 0.3)}, abs=1e-12
    )
    assert explain.reward([summary], [explanation]) == pytest.approx([2.4 + 0.6 * (8 / 27) / 0.3], abs=1e-12)


def test_words_are_letters_and_apostrophes_in_lower_case():
    # don't stop now x: 4 words on both sides, however they are written.
    scored = parts("Don't STOP-now 3x!", "don't\nstop... NOW x")
    assert scored == {"size": 0.0, "length_ratio": 0.0, "unique_ratio": 0.0, "style": 0.6}


def test_the_best_answers_reach_the_top_of_the_range():
    summary = words(10, 10)
    best = f"{summary} also however because {words(10, 10, 'b')}"
    assert explain.reward([summary, summary, ""], [best, "", best]) == [pytest.approx(3.0, abs=1e-12), 0.0, 0.0]
    assert explain.reward.reward_range == (0.0, 3.0)


vocabulary = st.sampled_from(["also", "however", "because", "first", "example", "a", "b", "c'", "Dd", "42", "é", "-", "\n"])
texts = st.one_of(st.text(max_size=80), st.lists(vocabulary, max_size=300).map(" ".join))


@given(texts, texts)
def test_every_score_is_in_its_range(summary, explanation):
    scored = parts(summary, explanation)
    tops = {"size": 0.5, "length_ratio": 1.0, "unique_ratio": 0.5, "style": 1.0}
    assert scored.keys() == tops.keys()
    assert all(0.0 <= scored[name] <= top + 1e-12 for name, top in tops.items())
    (total,) = explain.reward([summary], [explanation])
    assert total == pytest.approx(sum(scored.values()))
    assert 0.0 <= total <= 3.0
