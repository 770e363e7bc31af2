"""Model objects as agents, critics and comparators: what is copied, what is said, and what a failure leaves behind."""

from __future__ import annotations

import errno
from functools import partial

import pytest
import tiny_models
from safetensors.torch import load_file

from comlrl_ds.config import ConfigError, MADPOConfig
from comlrl_ds.config.iterative import MADPOIterConfig
from comlrl_ds.config.marlhf import MARLHFConfig
from comlrl_ds.trainers.preference import MADPOIterTrainer, MADPOTrainer, MARLHFTrainer


@pytest.fixture(scope="module")
def lms():
    return [tiny_models.llama(k, layers=1) for k in range(2)]


def given(**changes):
    basic = {
        "tokenizer": tiny_models.word_tokenizer(), "reward_func": lambda a, b: 0.0, "args": MADPOConfig(max_new_tokens=6),
        "rollout": {"backend": "transformers", "max_model_len": 40}, "train_dataset": [{"prompt": "w3"}], "verbose": False,
    }  # fmt: skip
    return basic | changes


def left(folder):
    return sorted(str(p.relative_to(folder)) for p in folder.rglob("*"))


# --- one object for several agents
def test_one_object_for_two_agents_is_said_and_starts_as_two_copies(tmp_path, lms):
    tied = tiny_models.llama(7, layers=1)
    tied.lm_head.weight = lms[0].lm_head.weight  # another object, of which one parameter is the first one's
    trainer = MADPOTrainer(
        agents=[lms[0], lms[0], tied, lms[1]], run_dir=tmp_path / "run",
        **given(reward_func=lambda *texts: 0.0, args=MADPOConfig(num_agents=4, max_new_tokens=6)),
    )  # fmt: skip
    copies = "they start as separate copies, which share no weights afterwards"
    said = [note for note in trainer._notes() if "separate copies" in note]
    assert said == [
        f"agent_0 and agent_1 are one model object: {copies}",
        f"agent_0 and agent_2 are model objects with parameters in common: {copies}",
    ]
    folders = [tmp_path / "run" / "sources" / f"agent_{i}" for i in range(4)]
    assert trainer.setup.sources == list(map(str, folders))
    for lm, folder in zip((lms[0], lms[0], tied, lms[1]), folders):
        found = load_file(folder / "model.safetensors")
        assert all(found[n].equal(p) for n, p in lm.named_parameters())


def test_folders_and_different_objects_are_nothing_to_speak_of(tmp_path, lms, model_folders):
    trainers = [MADPOTrainer(agents=lms, run_dir=tmp_path / "a", **given())]
    trainers += [MADPOTrainer(agents=[model_folders[0]] * 2, run_dir=tmp_path / "b", **given())]
    assert not any("separate copies" in note for t in trainers for note in t._notes())


def test_critics_are_compared_with_the_agents_too(tmp_path, lms):
    args = MARLHFConfig(max_new_tokens=6, rl_algorithm="iac", reward_model_name=str(tmp_path / "reward"))
    tiny_models.save(tmp_path / "reward", lms[0], tiny_models.word_tokenizer())
    tokenizer = tiny_models.word_tokenizer()
    critics = [tiny_models.save(tmp_path / "critic", lms[1], tokenizer), lms[0]]
    trainer = MARLHFTrainer(agents=lms, critics=critics, run_dir=tmp_path / "run", **given(args=args))
    assert [n.partition(":")[0] for n in trainer._notes() if "separate" in n] == ["agent_0 and critic_1 are one model object"]


# --- what is no list
@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"formatters": {"a": str, "b": str}}, "formatters: is a dict; give a list, one per agent, in the agents' order"),
        ({"formatters": {str, repr}}, "formatters: is a set; give a list"),
        ({"formatters": "package:formatters"}, "formatters: is a str; give a list"),
        (
            {"tokenizer": {0: tiny_models.word_tokenizer()}},
            "tokenizer: dict is no tokenizer; give one for all agents, or a list",
        ),
        ({"train_dataset": {"train": [{"prompt": "w3"}]}}, "train_dataset: is a mapping of 'train'; give a sequence of tasks"),
    ],
)
def test_what_has_no_order_is_refused_with_what_to_write(tmp_path, model_folders, changes, words):
    with pytest.raises(ConfigError) as caught:
        MADPOTrainer(agents=model_folders, run_dir=tmp_path / "run", **given(**changes))
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("agents", "words"),
    [
        ("folder", "agents: is a str; give a list, one per agent"),
        ({"writer": "a", "reader": "b"}, "agents: is a dict; give a list"),
        (5, "agents: is a int; give a list"),
    ],
)
def test_agents_are_a_list(tmp_path, agents, words):
    with pytest.raises(ConfigError, match=words):
        MADPOTrainer(agents=agents, run_dir=tmp_path / "run", **given())


def test_a_single_object_is_no_list(tmp_path, lms):
    with pytest.raises(ConfigError, match="agents: is a LlamaForCausalLM; give a list"):
        MADPOTrainer(agents=lms[0], run_dir=tmp_path / "run", **given())


# --- failures
class Unwritable:
    """A model that cannot be saved, whether the disk is full, the user loses patience, or it has a fault of its own."""

    def __init__(self, lm, error):
        self._lm, self._error = lm, error

    def named_parameters(self):
        return self._lm.named_parameters()

    def parameters(self):
        return self._lm.parameters()

    def save_pretrained(self, folder):
        self._lm.save_pretrained(folder)
        raise self._error


def marlhf(**changes):
    return partial(MARLHFTrainer, args=MARLHFConfig(max_new_tokens=6, rl_algorithm="iac", **changes))


@pytest.mark.parametrize(
    ("build", "changes", "error"),
    [
        (MADPOTrainer, {"reward_func": None}, ConfigError),
        (MADPOTrainer, {"formatters": lambda item: 3}, ConfigError),
        (MADPOTrainer, {"formatters": lambda item: 1 / 0}, ConfigError),
        (MADPOTrainer, {"tokenizer": None}, ConfigError),
        (MADPOTrainer, {"train_dataset": []}, ConfigError),
        (MADPOTrainer, {"eval_logger": print}, ConfigError),
        (MADPOTrainer, {"lora": {"target_modules": ["nowhere"]}}, ConfigError),
        (marlhf(), {}, ConfigError),  # no reward model, no critic
        (marlhf(reward_model_name="no/such/folder/here"), {}, ConfigError),
        (MADPOTrainer, {"second": OSError(errno.ENOSPC, "No space left on device")}, OSError),
        (MADPOTrainer, {"second": KeyboardInterrupt()}, KeyboardInterrupt),
        (MADPOTrainer, {"second": RuntimeError("shared memory")}, RuntimeError),
    ],
)
def test_a_constructor_that_fails_leaves_no_copy_behind(tmp_path, lms, build, changes, error):
    second = changes.get("second")
    agents = [lms[0], Unwritable(lms[1], second) if second else lms[1]]
    arguments = given(**{k: v for k, v in changes.items() if k != "second"})
    if isinstance(build, partial):
        del arguments["args"]
    with pytest.raises(error):
        build(agents=agents, run_dir=tmp_path / "some" / "where" / "run", **arguments)
    assert left(tmp_path) == []


def test_what_was_there_before_stays(tmp_path, lms):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "notes.txt").write_text("mine")
    with pytest.raises(ConfigError):
        MADPOTrainer(agents=lms, run_dir=tmp_path / "run", **given(reward_func=None))
    assert left(tmp_path) == ["run", "run/notes.txt"]


def test_comparators_that_fail_after_the_agents_leave_nothing(tmp_path, lms):
    other = tiny_models.llama(5, layers=1, vocab=tiny_models.VOCAB + 3)  # tokens that the agents' tokenizer does not have
    args = MADPOIterConfig(max_new_tokens=6, comparator_policy="model", comparator_agents=[other, 5])
    with pytest.raises(ConfigError, match=r"comparator_agents.1: int is neither"):
        MADPOIterTrainer(agents=lms, run_dir=tmp_path / "run", **given(args=args))
    assert left(tmp_path) == []


def test_a_peft_model_is_no_agent(tmp_path, lms):
    from peft import LoraConfig, get_peft_model

    adapted = get_peft_model(tiny_models.llama(3, layers=1), LoraConfig(r=2, target_modules=["q_proj"]))
    with pytest.raises(ConfigError, match=r"agents.1.model: a PEFT model; save it with save_pretrained and give that folder"):
        MADPOTrainer(agents=[lms[0], adapted], run_dir=tmp_path / "run", **given())
    assert left(tmp_path) == []


def test_a_resumed_run_keeps_the_models_that_it_started_from(tmp_path, lms):
    run = tmp_path / "run"
    started = MADPOTrainer(agents=lms, run_dir=run, **given())
    started.run_dir.create(started._resolved_config())
    before = {p: p.read_bytes() for p in run.rglob("*") if p.is_file()}
    MADPOTrainer(agents=lms, run_dir=run, resume="auto", **given())
    again = [lms[0], tiny_models.llama(9, layers=1)]
    with pytest.raises(
        ConfigError, match=r"agents.1.model: has other weights than the model object that the run in .* started"
    ):
        MADPOTrainer(agents=again, run_dir=run, resume="auto", **given())
    with pytest.raises(ConfigError, match="already holds a run"):
        MADPOTrainer(agents=lms, run_dir=run, **given())
    assert {p: p.read_bytes() for p in run.rglob("*") if p.is_file()} == before
