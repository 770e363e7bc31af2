"""Run files and overrides: what is accepted, and how what is wrong is said."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from run_files import GOOD, problems, written

from comlrl_ds.config import load_run_file
from comlrl_ds.config.references import resolve


def test_a_good_file(tmp_path):
    run = load_run_file(written(tmp_path, GOOD))
    assert [a.model for a in run.agents] == ["a", "b"]
    # YAML 1.1 reads 1e-5 as a string.
    assert run.trainer_config.agent_learning_rate == 1e-5
    assert run.trainer_config.token_limits == [48, 96]
    assert (run.rollout.backend, run.dtype, run.attn_implementation, run.run.seed) == ("vllm", "auto", "sdpa", 0)
    assert run.run.dir.startswith("runs/run-")


def test_the_number_of_agents_follows_from_their_list(tmp_path):
    run = load_run_file(written(tmp_path, GOOD), ["agents=[{model: a}, {model: b}, {model: c}]", "args.max_new_tokens=9"])
    assert run.trainer_config.num_agents == 3
    found = problems(lambda: load_run_file(written(tmp_path, GOOD), ["args.num_agents=3"]))
    assert found == {"args.num_agents": "3 contradicts the 2 entries of agents; leave it out"}


def test_overrides(tmp_path):
    file = written(tmp_path, GOOD)
    run = load_run_file(
        file,
        [
            "args.agent_learning_rate=2e-6",
            "args.max_new_tokens.1=7",
            "agents.0.model=other",
            "run.seed=5",
            "rollout.engines=2",
            "args.pair_selection=all",
            "args.preference_pairs_per_sample=null",
            "run.dir=x=y",
        ],
    )
    assert run.trainer_config.agent_learning_rate == 2e-6
    assert run.trainer_config.token_limits == [48, 7]
    assert run.trainer_config.preference_pairs_per_sample is None
    assert [a.model for a in run.agents] == ["other", "b"]
    assert (run.run.seed, run.rollout.engines, run.run.dir) == (5, 2, "x=y")
    assert load_run_file(file).trainer_config.token_limits == [48, 96]


@pytest.mark.parametrize(
    ("override", "path", "part"),
    [
        ("args.dpo_beta", "args.dpo_beta", "write path.to.setting=value"),
        ("arg.dpo_beta=1", "arg.dpo_beta", "did you mean 'args'"),
        ("agents.7.model=x", "agents.7.model", "no index of a list of 2"),
        ("agents.first.model=x", "agents.first.model", "no index of a list of 2"),
        ("args.agent_learning_rate.x=1", "args.agent_learning_rate.x", "not a section"),
        ("args.dpo_beta=-1", "args.dpo_beta", "greater than 0"),
        ("args.dpo_bta=1", "args.dpo_bta", "did you mean 'dpo_beta'"),
        ("rollout.backend=vlm", "rollout.backend", "'vlm' is not one of"),
    ],
)
def test_wrong_overrides(tmp_path, override, path, part):
    found = problems(lambda: load_run_file(written(tmp_path, GOOD), [override]))
    assert found.keys() == {path}
    assert part in found[path]


def test_every_broken_place_is_listed_with_its_path(tmp_path):
    file = written(
        tmp_path,
        """
        trainer: madpo
        agents:
          - {modle: a}
          - {model: b}
        task: {dataset: a:b}
        args: {dpo_beta: 0, top_p: 2, candidates: 3, pair_selection: best}
        rollout: {backend: vlm, gpu_memory_utilization: 1.5}
        run: {seed: -1, report_to: [mlflow]}
        dtipe: float32
        """,
    )
    found = problems(lambda: load_run_file(file, ["agents.9.model=x"]))
    assert found.keys() == {
        "agents.0.modle", "agents.0.model", "task.reward_func", "args.dpo_beta", "args.top_p", "args.candidates",
        "args.pair_selection", "rollout.backend", "rollout.gpu_memory_utilization", "run.seed", "run.report_to.0", "dtipe",
        "agents.9.model", "task.dataset",
    }  # fmt: skip
    assert found["agents.0.modle"] == "unknown setting; did you mean 'model'?"
    assert found["task.reward_func"] == "required"
    assert found["dtipe"] == "unknown setting; did you mean 'dtype'?"
    assert "'random'" in found["args.pair_selection"]


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("- a\n- b\n", "must be a mapping"),
        ("", "must be a mapping"),
        ("trainer: [madpo\n", "not YAML"),
        ("a: b: c\n", "not YAML"),
        ("trainer: \x00\n", "not YAML"),
    ],
)
def test_files_that_are_no_run_file(tmp_path, text, part):
    file = written(tmp_path, text)
    found = problems(lambda: load_run_file(file))
    assert found.keys() == {str(file)}
    assert part in found[str(file)]
    assert "\n" not in found[str(file)]


def test_a_file_that_is_not_there(tmp_path):
    assert problems(lambda: load_run_file(tmp_path / "no.yaml")) == {str(tmp_path / "no.yaml"): "no such file"}


def test_a_folder_in_place_of_a_file(tmp_path):
    assert problems(lambda: load_run_file(tmp_path)).keys() == {str(tmp_path)}


def test_a_file_that_is_not_text(tmp_path):
    file = tmp_path / "run.yaml"
    file.write_bytes(b"\xff\xfe\x00\x81")
    assert "not YAML" in problems(lambda: load_run_file(file))[str(file)]


def test_names_that_yaml_reads_as_numbers_are_refused(tmp_path):
    found = problems(lambda: load_run_file(written(tmp_path, GOOD + "  16: x\n")))
    assert any(path.startswith("args") for path in found)


@pytest.mark.parametrize("trainer", ["madpo_itre", 3, None])
def test_an_unknown_trainer(tmp_path, trainer):
    data = yaml.safe_load(GOOD) | {"trainer": trainer}
    assert "trainer" in problems(lambda: load_run_file(written(tmp_path, yaml.safe_dump(data))))


def test_the_quickstart_is_a_valid_run_file():
    file = Path(__file__).parents[2] / "launch" / "examples" / "quickstart.yaml"
    run = load_run_file(file)
    assert run.trainer_config.token_limits == [48, 96]
    for name in ("dataset", "eval_dataset", "reward_func", "formatters"):
        assert resolve(getattr(run.task, name), f"task.{name}", file.parent) is not None


def test_what_a_broken_file_names_is_checked_in_the_same_look(tmp_path):
    """Objects, folders and files that are not there stand beside the mistakes of the file itself."""
    file = written(
        tmp_path,
        """
        trainer: madpo
        agents: [{model: ./not/here}, {model: some/repository}]
        task: {dataset: comlrl_ds.tasks.explain:train_item, reward_func: no_such_module:reward, formatters: [nothing]}
        args: {dpo_betta: 1}
        deepspeed: ds_configs/zero9.json
        """,
    )
    found = problems(lambda: load_run_file(file))
    assert found.keys() == {
        "args.dpo_betta", "agents.0.model", "task.dataset", "task.reward_func", "task.formatters.0", "deepspeed",
    }  # fmt: skip
    assert "did you mean 'train_items'" in found["task.dataset"]
    assert "no_such_module" in found["task.reward_func"] and "zero9.json" in found["deepspeed"]


def test_an_override_reaches_a_role_of_one_agent(tmp_path):
    text = GOOD + "placement: {groups: {all: [0]}, roles: {actor: all}}"
    words = ["placement.roles.actor.1.deepspeed=a.json", "placement.roles.actor.1.group=all", "placement.roles.actor.0=all"]
    roles = load_run_file(written(tmp_path, text), words).placement.roles
    assert (roles["actor.1"].deepspeed, roles["actor.0"].group, roles["actor"].group) == ("a.json", "all", "all")
