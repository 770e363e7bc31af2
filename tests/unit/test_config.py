"""Settings, run files, references and the command line: what is accepted, and how what is wrong is said."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import yaml

from comlrl_ds.cli import main
from comlrl_ds.config import ConfigError, MADPOConfig, Problem, load_run_file
from comlrl_ds.config.references import resolve

# The page's names and defaults.
DEFAULTS = {
    "num_train_epochs": 20,
    "agent_learning_rate": 5e-6,
    "logging_steps": 50,
    "num_agents": 2,
    "collaboration_mode": "decentralized",
    "parallel_training": "none",
    "agent_devices": None,
    "max_new_tokens": 256,
    "temperature": 0.6,
    "top_p": 0.6,
    "top_k": 50,
    "num_turns": 1,
    "discount": 1.0,
    "joint_mode": "aligned",
    "early_termination_threshold": None,
    "external_prompt_passthrough": False,
    "eval_interval": 16,
    "eval_num_samples": 4,
    "eval_batch_size": 1,
    "rollout_buffer_size": 2,
    "train_batch_size": None,
    "advantage_normalization": True,
    "advantage_mode": "mean",
    "reference_kl_enabled": False,
    "reference_kl_coef": 0.1,
    "reference_devices": None,
    "preference_num_candidates": 80,
    "preference_pairs_per_sample": 16,
    "pair_selection": "reward_gap",
    "dpo_beta": 0.1,
    "use_environment_step": True,
    "environment_steps_per_pair": 2,
}
ADDITIONS = {
    "overlong_prompt": "error",
    "oracle_on_error": "raise",
    "max_invalid_fraction": 0.5,
    "collection_chunk_items": None,
    "max_grad_norm": None,
    "max_tokens_per_micro_batch": 2048,
    "margin_pass": "auto",
    "row_layout": "auto",
    "logprob_chunk": 512,
    "gradient_checkpointing": False,
    "score_last_token": None,
    "disable_dropout": True,
    "max_nonfinite_steps": 3,
    "eval_samples_per_item": 1,
    "eval_temperature": None,
}


def problems(call) -> dict[str, str]:
    with pytest.raises(ConfigError) as caught:
        call()
    return {p.path: p.message for p in caught.value.problems}


# --- MADPOConfig
def test_defaults_are_the_pages():
    config = MADPOConfig()
    assert {name: getattr(config, name) for name in DEFAULTS} == DEFAULTS
    assert {name: getattr(config, name) for name in ADDITIONS} == ADDITIONS
    assert set(MADPOConfig.model_fields) == DEFAULTS.keys() | ADDITIONS.keys()
    assert config.scores_last_token is False
    assert config.batch_size == 2
    assert config.token_limits == [256, 256]


def test_derived_values():
    assert MADPOConfig(rollout_buffer_size=8).batch_size == 8
    assert MADPOConfig(rollout_buffer_size=8, train_batch_size=3).batch_size == 3
    assert MADPOConfig(max_new_tokens=[5, 7]).token_limits == [5, 7]
    assert MADPOConfig(num_agents=3, max_new_tokens=9).token_limits == [9, 9, 9]
    assert MADPOConfig(score_last_token=True).scores_last_token is True


@pytest.mark.parametrize(
    ("name", "good", "bad"),
    [
        ("num_train_epochs", [1], [0, -1, 1.5]),
        ("logging_steps", [1], [0]),
        ("num_agents", [1, 5], [0]),
        ("collaboration_mode", ["decentralized"], ["Decentralized", "both"]),
        ("num_turns", [1], [0, 2]),
        ("eval_interval", [0, 7], [-1]),
        ("eval_num_samples", [0, 7], [-1]),
        ("eval_batch_size", [1], [0]),
        ("eval_temperature", [None, 0.0, 1.0], [-0.1]),
        ("rollout_buffer_size", [1], [0]),
        ("train_batch_size", [1, None], [0]),
        ("advantage_mode", ["mean", "raw", "max", "rloo"], ["min"]),
        ("reference_kl_coef", [0.0, 1.0], [-0.1]),
        ("preference_num_candidates", [2], [1]),
        ("preference_pairs_per_sample", [1, None], [0]),
        ("dpo_beta", [1e-9, 5.0], [0.0, -1.0]),
        ("environment_steps_per_pair", [1], [0]),
        ("temperature", [1e-3, 2.0], [0.0]),
        ("top_p", [0.1, 1.0], [0.0, 1.1]),
        ("top_k", [1, None], [0]),
        ("max_new_tokens", [1, [1, 2]], [0, [0, 2], [1, 2, 3], [1], []]),
        ("agent_devices", [None, "cpu", ["cpu"], ["cpu", "cpu"]], [["cpu"] * 3, []]),
        ("reference_devices", [None, "cpu", ["cpu"], ["cpu", "cpu"]], [["cpu"] * 3]),
        ("max_invalid_fraction", [0.0, 1.0], [-0.1, 1.1]),
        ("max_grad_norm", [None, 0.5], [0.0]),
        ("max_nonfinite_steps", [1], [0]),
        ("overlong_prompt", ["error", "drop", "truncate_left"], ["cut"]),
        ("oracle_on_error", ["raise", "invalid"], ["ignore"]),
        ("margin_pass", ["auto", "one_forward", "two_pass"], ["both"]),
        ("row_layout", ["auto", "shared", "rows"], ["packed"]),
    ],
)
def test_rules(name, good, bad):
    for value in good:
        assert getattr(MADPOConfig(**{name: value}), name) == value
    for value in bad:
        found = problems(lambda value=value: MADPOConfig(**{name: value}))
        assert found
        assert all(name in f"{path}: {message}" for path, message in found.items())


def test_case_blanks_and_aliases():
    config = MADPOConfig(pair_selection=" Random ", parallel_training="NULL", joint_mode="Align")
    assert (config.pair_selection, config.parallel_training, config.joint_mode) == ("random", "none", "aligned")
    assert MADPOConfig(parallel_training=" MP").parallel_training == "mp"
    config = MADPOConfig(pair_selection=None, parallel_training=None)
    assert (config.pair_selection, config.parallel_training) == ("reward_gap", "none")


def test_all_pairs_have_no_cap():
    with pytest.raises(ConfigError, match=r"preference_pairs_per_sample: 16 contradicts pair_selection .all.; write null"):
        MADPOConfig(pair_selection="all")
    assert MADPOConfig(pair_selection="all", preference_pairs_per_sample=None).preference_pairs_per_sample is None


def test_an_unknown_name_suggests_the_nearest():
    found = problems(lambda: MADPOConfig(dpo_betta=0.2))
    assert found == {"dpo_betta": "unknown setting; did you mean 'dpo_beta'?"}
    assert "valid: " in problems(lambda: MADPOConfig(zzz=0))["zzz"]


@pytest.mark.parametrize("name", ["interval", "strategy", "integer"])
def test_an_unknown_name_is_named_whatever_it_begins_with(name):
    assert list(problems(lambda: MADPOConfig(**{name: 1}))) == [name]


def test_every_problem_is_found_at_once():
    assert problems(lambda: MADPOConfig(dpo_beta=0, top_p=3, num_agent=2)).keys() == {"dpo_beta", "top_p", "num_agent"}


def test_every_wrong_list_is_found_at_once_at_its_own_place():
    found = problems(lambda: MADPOConfig(max_new_tokens=[1, 2, 3], agent_devices=["cpu"] * 3, pair_selection="all"))
    assert found.keys() == {"max_new_tokens", "agent_devices", "preference_pairs_per_sample"}


def test_assigning_checks_too():
    config = MADPOConfig()
    config.dpo_beta = 0.5
    with pytest.raises(ValueError, match="dpo_beta"):
        config.dpo_beta = -1.0
    assert config.dpo_beta == 0.5


def test_errors_are_value_errors_of_one_line_per_problem():
    error = ConfigError([Problem("a.b", "is wrong"), Problem("", "no place")])
    assert isinstance(error, ValueError)
    assert str(error) == "a.b: is wrong\nno place"
    assert str(error.under("args")) == "args.a.b: is wrong\nargs: no place"


# --- run files
GOOD = """
trainer: madpo
agents:
  - {model: a}
  - {model: b}
task:
  dataset: comlrl_ds.tasks.explain:train_items
  reward_func: comlrl_ds.tasks.explain:reward
args:
  agent_learning_rate: 1e-5
  max_new_tokens: [48, 96]
"""


def written(folder: Path, text: str) -> Path:
    file = folder / "run.yaml"
    file.write_text(textwrap.dedent(text))
    return file


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
        run: {seed: -1, report_to: [wandb]}
        dtipe: float32
        """,
    )
    found = problems(lambda: load_run_file(file, ["agents.9.model=x"]))
    assert found.keys() == {
        "agents.0.modle", "agents.0.model", "task.reward_func", "args.dpo_beta", "args.top_p", "args.candidates",
        "args.pair_selection", "rollout.backend", "rollout.gpu_memory_utilization", "run.seed", "run.report_to.0", "dtipe",
        "agents.9.model",
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


# --- references
def test_references(tmp_path):
    (tmp_path / "mine.py").write_text("def score(a, b):\n    return 1.0\n\nclass Box:\n    inner = 5\n")
    assert resolve("os.path:join", "x", tmp_path) is os.path.join
    assert resolve("mine.py:score", "x", tmp_path)(1, 2) == 1.0
    assert resolve("mine.py:Box.inner", "x", tmp_path) == 5
    assert resolve(f"{tmp_path}/mine.py:Box", "x", Path("/")).inner == 5
    # One file is one module, however often and by whatever name it is mentioned.
    assert resolve("mine.py:Box", "x", tmp_path) is resolve(f"{tmp_path}/mine.py:Box", "x", tmp_path)


def test_a_file_is_looked_up_beside_the_run_file_first(tmp_path, monkeypatch):
    for name in ("beside", "here"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "which.py").write_text(f"where = {name!r}")
    (tmp_path / "here" / "only.py").write_text("where = 'working directory'")
    monkeypatch.chdir(tmp_path / "here")
    assert resolve("which.py:where", "x", tmp_path / "beside") == "beside"
    assert resolve("only.py:where", "x", tmp_path / "beside") == "working directory"


@pytest.mark.parametrize(
    ("reference", "part"),
    [
        ("os.path", "names no object; write 'package.module:attribute'"),
        (":join", "names no object"),
        ("os.path:", "names no object"),
        ("no_such_package.part:x", "no module named 'no_such_package'"),
        ("comlrl_ds.tasks.explian:reward", "no module named 'comlrl_ds.tasks.explian'"),
        ("comlrl_ds.tasks.explain:rewrd", "did you mean 'reward'?"),
        ("comlrl_ds.tasks.explain:reward.x", "has no 'x'"),
        ("gone.py:x", "no file 'gone.py' (looked in "),
        ("broken.py:x", "ZeroDivisionError"),
        ("wordless.py:x", "SyntaxError"),
        ("needy.py:x", "no_such_package"),
        ("mine.py:scor", "did you mean 'score'?"),
        (".relative:x", "importing '.relative' failed"),
    ],
)
def test_wrong_references(tmp_path, reference, part):
    (tmp_path / "broken.py").write_text("1 / 0")
    (tmp_path / "wordless.py").write_text("def (")
    (tmp_path / "needy.py").write_text("import no_such_package")
    (tmp_path / "mine.py").write_text("def score(): ...")
    found = problems(lambda: resolve(reference, "task.reward_func", tmp_path))
    assert found.keys() == {"task.reward_func"}
    assert part in found["task.reward_func"]


def test_a_broken_file_can_be_mended_and_read_again(tmp_path):
    file = tmp_path / "mended.py"
    file.write_text("1 / 0")
    problems(lambda: resolve("mended.py:x", "task.dataset", tmp_path))
    file.write_text("x = 3")
    assert resolve("mended.py:x", "task.dataset", tmp_path) == 3


# --- the command line
BROKEN = GOOD.replace("1e-5", "-1") + "  dpo_bta: 2\n"


def test_plan_of_a_broken_file(tmp_path, capsys):
    file = written(tmp_path, BROKEN)
    assert main(["plan", str(file)]) == 2
    out, err = capsys.readouterr()
    lines = err.splitlines()
    assert out == ""
    assert lines[0] == "comlrl-ds: 2 problems"
    assert {line.strip().split(":")[0] for line in lines[1:]} == {"args.agent_learning_rate", "args.dpo_bta"}
    assert len(lines) == 3


def test_plan_says_one_line_per_problem_of_any_section(tmp_path, capsys):
    text = GOOD.replace("{model: b}", "{modle: b}") + "rollout: {backend: vlm, engines: 0}\nrun: {seed: -1}\n"
    assert main(["plan", str(written(tmp_path, text))]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "comlrl-ds: 5 problems"
    places = ["agents.1.model", "agents.1.modle", "rollout.backend", "rollout.engines", "run.seed"]
    assert sorted(line.split(": ")[0] for line in lines[1:]) == [f"  {place}" for place in places]


def test_plan_of_a_broken_file_loads_nothing(tmp_path):
    code = (
        "import sys; from comlrl_ds.cli import main; code = main(sys.argv[1:]);"
        "print(*sorted({'torch', 'transformers', 'vllm', 'deepspeed'} & sys.modules.keys())); sys.exit(code)"
    )
    command = [sys.executable, "-c", code, "plan", str(written(tmp_path, BROKEN))]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, timeout=60)
    assert (done.returncode, done.stdout) == (2, "\n")
    assert len(done.stderr.splitlines()) == 3
    assert list(tmp_path.iterdir()) == [tmp_path / "run.yaml"]


@pytest.mark.parametrize("place", [0, 1, 2, 3])
@pytest.mark.parametrize("word", ["--local_rank=3", "--local-rank=0"])
def test_the_launchers_rank_is_accepted_anywhere(tmp_path, capsys, place, word):
    words = ["plan", str(written(tmp_path, GOOD)), "args.dpo_bta=1"]
    assert main([*words[:place], word, *words[place:]]) == 2
    assert capsys.readouterr().err.splitlines() == [
        "comlrl-ds: 1 problem",
        "  args.dpo_bta: unknown setting; did you mean 'dpo_beta'?",
    ]


def runnable(tmp_path: Path, folders: list[str], extra: str = "") -> Path:
    return written(
        tmp_path,
        f"""
trainer: madpo
agents:
  - {{model: {folders[0]}}}
  - {{model: {folders[1]}}}
task: {{dataset: "tasks.py:train", reward_func: "tasks.py:reward"}}
args: {{max_new_tokens: 8, agent_learning_rate: 1e-5}}
rollout: {{backend: transformers}}
run: {{dir: {tmp_path}/out}}
{extra}""",
    )


@pytest.fixture
def tasks(tmp_path):
    (tmp_path / "tasks.py").write_text(
        "train = [{'prompt': 'w3 w4'}]\ndef reward(a, b):\n    return [0.0]\ndef one(a, b, c, d, e):\n    return 0\n"
    )
    return tmp_path


def test_plan_of_a_good_file_says_what_would_run_and_writes_nothing(tasks, model_folders, capsys):
    assert main(["plan", str(runnable(tasks, model_folders))]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    assert "no problems" in out
    assert "up to 8 new tokens" in out
    assert not (tasks / "out").exists()


def test_numbers_of_an_inline_deepspeed_section_are_numbers(tasks, model_folders, capsys):
    # The same 1e-5 in two places of one file must be the same number.
    extra = "deepspeed: {zero_optimization: {stage: 1}, optimizer: {type: AdamW, params: {lr: 1e-5}}}"
    assert main(["plan", str(runnable(tasks, model_folders, extra))]) == 0, capsys.readouterr().err


@pytest.mark.parametrize(
    ("override", "path", "part"),
    [
        ("agents.1.model=./nowhere", "agents.1.model", "no folder './nowhere'"),
        ("task.reward_func=tasks.py:rewrd", "task.reward_func", "did you mean 'reward'?"),
        ("task.reward_func=tasks.py:one", "reward_func", "takes 5 positional arguments; for 2 agents write 2"),
        ("task.reward_func=tasks.py:train", "reward_func", "is not callable"),
        ("task.dataset=os:sep", "train_dataset", "tasks must be mappings, the first is str"),
        ("task.dataset=os:getpid", "task.dataset", "it must give a sequence of mappings"),
        ("task.formatters=[os.path:join]", "formatters", "1 formatters for 2 agents"),
        ("args.max_new_tokens=100000", "max_new_tokens", "leave no room for a prompt"),
        ("deepspeed=nowhere.json", "deepspeed", "no file 'nowhere.json'"),
        ("args.agent_devices=cuda:7", "args.agent_devices", "is not on this machine"),
    ],
)
def test_plan_checks_what_the_file_names(tasks, model_folders, capsys, override, path, part):
    assert main(["plan", str(runnable(tasks, model_folders)), override]) == 2
    lines = [line.strip() for line in capsys.readouterr().err.splitlines()[1:]]
    assert any(line.startswith(f"{path}: ") and part in line for line in lines), lines
    assert not (tasks / "out").exists()


def test_several_ranks_are_refused_while_all_roles_share_one_process(tasks, model_folders, capsys, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert main(["plan", str(runnable(tasks, model_folders))]) == 2
    assert "started with 2 ranks" in capsys.readouterr().err


def test_a_folder_that_holds_a_run_is_refused(tasks, model_folders, capsys):
    (tasks / "out").mkdir()
    (tasks / "out" / "config.yaml").write_text("trainer: madpo")
    assert main(["plan", str(runnable(tasks, model_folders))]) == 2
    assert "run.dir: " in capsys.readouterr().err


def test_the_quickstart_is_a_valid_run_file():
    file = Path(__file__).parents[2] / "launch" / "examples" / "quickstart.yaml"
    run = load_run_file(file)
    assert run.trainer_config.token_limits == [48, 96]
    for name in ("dataset", "eval_dataset", "reward_func", "formatters"):
        assert resolve(getattr(run.task, name), f"task.{name}", file.parent) is not None
