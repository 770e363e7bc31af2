"""Tasks to prompts, joint responses to scores, and evaluation by the task's own reward."""

from __future__ import annotations

import functools
import json
import math
from fractions import Fraction

import numpy as np
import pytest
import tiny_models
import torch
from hypothesis import given
from hypothesis import strategies as st

from comlrl_ds.config import ConfigError, MADPOConfig
from comlrl_ds.preference.oracle import Oracle, OracleError, OracleResultError
from comlrl_ds.preference.prompts import PromptBuilder, PromptError, check_formatters, default_formatter, encode_prompt
from comlrl_ds.trainers.preference import MADPOTrainer

# --- prompts
WITH_BOS = "{{ bos_token }}{% for m in messages %} {{ m['content'] }}{% endfor %}{% if add_generation_prompt %} w9{% endif %}"
WITHOUT_BOS = WITH_BOS.replace("{{ bos_token }}", "")
MESSAGES = [{"role": "system", "content": "w5"}, {"role": "user", "content": "w6 w7"}]


@pytest.mark.parametrize("template", [WITH_BOS, WITHOUT_BOS], ids=["template-writes-bos", "template-without"])
def test_a_chat_prompt_has_exactly_one_bos(template):
    # A template that writes the BOS and a tokenizer that adds one give two (public report: axolotl#1616).
    prompt = encode_prompt(tiny_models.word_tokenizer(chat_template=template), MESSAGES)
    assert prompt.ids == (1, 5, 6, 7, 9)


def test_a_bos_that_the_tokenizer_does_not_add_comes_from_the_template_alone():
    make = functools.partial(tiny_models.word_tokenizer, adds_bos=False)
    assert encode_prompt(make(chat_template=WITHOUT_BOS), MESSAGES).ids == (5, 6, 7, 9)
    assert encode_prompt(make(chat_template=WITH_BOS), MESSAGES).ids == (1, 5, 6, 7, 9)
    assert encode_prompt(make(), "w5 w6").ids == (5, 6)


def test_a_tokenizer_without_bos_gets_none():
    tokenizer = tiny_models.word_tokenizer(bos=False, chat_template=WITHOUT_BOS)
    assert tokenizer.bos_token_id is None
    assert encode_prompt(tokenizer, MESSAGES).ids == (5, 6, 7, 9)
    assert encode_prompt(tokenizer, "w5 w6").ids == (5, 6)


def test_a_string_is_used_as_it_is():
    tokenizer = tiny_models.word_tokenizer(chat_template=WITH_BOS)
    prompt = encode_prompt(tokenizer, " w5  w6 ")
    assert (prompt.text, prompt.ids) == (" w5  w6 ", (1, 5, 6))
    # A user who writes the BOS by hand means one, not two.
    assert encode_prompt(tokenizer, "<s> w5").ids == (1, 5)


@pytest.mark.parametrize(
    ("result", "part"),
    [
        (None, "returned NoneType; return a string or a list"),
        (5, "returned int"),
        ([], "returned an empty list; return"),
        (["w5"], "message 0 is str 'w5'; a chat message is"),
        ([{"content": "w5"}], "message 0 is dict"),
        ({"role": "user", "content": "w5"}, "returned dict"),
        (b"w5", "returned bytes"),
        ("", "the prompt is empty"),
        (" \n", "the prompt is empty"),
    ],
)
def test_a_formatter_of_another_kind_is_refused_by_task_and_agent(result, part):
    tokenizer = tiny_models.word_tokenizer(chat_template=WITH_BOS)
    builder = PromptBuilder([tokenizer] * 2, [lambda item: "w3", lambda item: result], [99, 99])
    with pytest.raises(PromptError, match=f"^task 4, agent 1[:,] .*{part}"):
        builder.build([{}] * 5, [4])


def test_messages_need_a_chat_template():
    with pytest.raises(PromptError, match=r"task 0, agent 0: .*no chat template; return a string"):
        PromptBuilder([tiny_models.word_tokenizer()], [lambda item: MESSAGES], [99]).build([{}])


def test_a_prompt_without_tokens_is_refused():
    builder = PromptBuilder([tiny_models.word_tokenizer(bos=False)], [default_formatter], [99])
    with pytest.raises(PromptError, match="task 1, agent 0: the prompt is empty"):
        builder.build([{"prompt": "w3"}, {"prompt": ""}])


def fails(item):
    return item["question"]


@pytest.mark.parametrize("template", [None, "{{ raise_exception('no system role') }}"], ids=["formatter", "template"])
def test_a_formatter_or_template_that_raises_is_named_by_task_and_agent(template):
    tokenizer = tiny_models.word_tokenizer(chat_template=template)
    formatter = fails if template is None else lambda item: MESSAGES
    with pytest.raises(PromptError, match="task 0, agent 0"):
        PromptBuilder([tokenizer], [formatter], [99]).build([{"prompt": "w3"}])


def test_each_agent_has_its_own_formatter_tokenizer_and_limit():
    tokenizers = [tiny_models.word_tokenizer(), tiny_models.word_tokenizer(bos=False)]
    formatters = check_formatters([lambda item: item["a"], lambda item: item["b"]], 2)
    builder = PromptBuilder(tokenizers, formatters, [3, 9])
    (joint,) = builder.build([{"a": "w3 w4", "b": "w5 w6 w7 w8"}])
    assert [p.ids for p in joint.prompts] == [(1, 3, 4), (5, 6, 7, 8)]
    with pytest.raises(PromptError, match="task 0, agent 0: the prompt has 4 tokens, but only 3"):
        builder.build([{"a": "w3 w4 w5", "b": "w5"}])


def test_one_formatter_serves_all_and_none_reads_the_tasks_prompt():
    assert [f({"prompt": "w3"}) for f in check_formatters(None, 3)] == ["w3"] * 3
    assert check_formatters(str, 3) == [str] * 3
    with pytest.raises(ConfigError, match="formatters: 1 formatters for 2 agents"):
        check_formatters([str], 2)
    with pytest.raises(ConfigError, match=r"formatters\.1: 'x' is not callable"):
        check_formatters([str, "x"], 2)


def test_only_a_formatter_that_names_external_prompts_gets_them():
    seen = []

    def outside(item, external_prompts="unset"):
        seen.append(external_prompts)
        return "w3"

    PromptBuilder([tiny_models.word_tokenizer()] * 2, [outside, lambda item: "w3"], [99] * 2).build([{}])
    assert seen == [None]


# --- the oracle's calling conventions
ITEM = {"prompt": "own", "answer": 42}
PROMPTS, TEXTS = ["p0", "p1", "p2"], ["c0", "c1", "c2"]


def called_with(make, n):
    """Arguments that a function made by `make(seen)` receives for n agents."""
    seen = []
    Oracle(make(seen), n).score(ITEM, 7, PROMPTS[:n], TEXTS[:n])
    assert len(seen) == 1
    return seen[0]


def record(seen, *values):
    seen.append(values)
    return 1.0


FORMS = {
    "one list per agent": (2, lambda s: lambda a, b: record(s, a, b), (["c0"], ["c1"])),
    "of three agents": (3, lambda s: lambda a, b, c: record(s, a, b, c), (["c0"], ["c1"], ["c2"])),
    "varargs": (2, lambda s: lambda *a: record(s, *a), (["c0"], ["c1"])),
    "prompts first": (2, lambda s: lambda p, a, b: record(s, p, a, b), (["p0"], ["c0"], ["c1"])),
    "prompts first by name": (2, lambda s: lambda prompts, a, b: record(s, prompts, a, b), (["p0"], ["c0"], ["c1"])),
    "one list of lists": (2, lambda s: lambda joint: record(s, joint), ([["c0"], ["c1"]],)),
    "one agent": (1, lambda s: lambda a: record(s, a), (["c0"],)),
    "one agent, prompts first": (1, lambda s: lambda p, a: record(s, p, a), (["p0"], ["c0"])),
    "one agent, prompts by name": (1, lambda s: lambda prompts, a: record(s, prompts, a), (["p0"], ["c0"])),
    "one agent, varargs": (1, lambda s: lambda *a: record(s, *a), (["c0"],)),
    "the task": (2, lambda s: lambda a, b, batch_items: record(s, a, b, batch_items), (["c0"], ["c1"], [ITEM])),
    "the task by default": (2, lambda s: lambda a, b, batch_items=None: record(s, a, b, batch_items), (["c0"], ["c1"], [ITEM])),
    "keyword only": (
        2,
        lambda s: lambda a, b, *, prompts, batch_items: record(s, a, b, prompts, batch_items),
        (["c0"], ["c1"], ["p0"], [ITEM]),
    ),
    "varargs and the task": (2, lambda s: lambda *a, batch_items: record(s, *a, batch_items), (["c0"], ["c1"], [ITEM])),
    "one list and the task": (
        2,
        lambda s: lambda joint, batch_items: record(s, joint, batch_items),
        ([["c0"], ["c1"]], [ITEM]),
    ),
    "any keyword": (
        2,
        lambda s: lambda a, b, **k: record(s, a, b, k),
        (["c0"], ["c1"], {"batch_items": [ITEM], "prompts": ["p0"]}),
    ),
    "prompts first and any keyword": (
        2,
        lambda s: lambda p, a, b, **k: record(s, p, a, b, k),
        (["p0"], ["c0"], ["c1"], {"batch_items": [ITEM]}),
    ),
    "settings with defaults": (2, lambda s: lambda a, b, scale=2.0: record(s, a, b, scale), (["c0"], ["c1"], 2.0)),
    "partial": (2, lambda s: functools.partial(lambda k, a, b: record(s, k, a, b), "bound"), ("bound", ["c0"], ["c1"])),
}  # fmt: skip


@pytest.mark.parametrize("form", FORMS)
def test_calling_form(form):
    n, make, expected = FORMS[form]
    assert called_with(make, n) == expected


def test_a_bound_method_and_a_callable_object():
    class Judge:
        def __init__(self):
            self.seen = []

        def __call__(self, a, b):
            return record(self.seen, a, b)

        def method(self, a, b):
            return record(self.seen, a, b)

    judge = Judge()
    for function in (judge, judge.method):
        Oracle(function, 2).score(ITEM, 0, PROMPTS[:2], TEXTS[:2])
    assert judge.seen == [(["c0"], ["c1"])] * 2


def test_a_function_without_a_readable_signature_gets_the_lists():
    # max(["1"], ["2"]) is ["2"], so the lists reached it.
    with pytest.raises(OracleError, match=r"reward function max returned list \['2'\]"):
        Oracle(max, 2).score(ITEM, 0, PROMPTS[:2], ["1", "2"])


@pytest.mark.parametrize(
    ("function", "n", "part"),
    [
        (lambda a, b, c, d: 0, 2, "takes 4 positional arguments; for 2 agents write 2"),
        (lambda a, b: 0, 4, "for 4 agents write 4"),
        (lambda: 0, 2, "takes 0 positional arguments"),
        ("name", 2, "is not callable"),
    ],
)
def test_a_signature_that_fits_no_form_is_refused_before_anything_runs(function, n, part):
    with pytest.raises(ConfigError, match=f"^reward_func: .*{part}"):
        Oracle(function, n)


@pytest.mark.parametrize(
    ("returned", "value"),
    [
        (3, 3.0),
        (0.25, 0.25),
        (True, 1.0),
        ((0.5,), 0.5),
        (torch.tensor(0.5), 0.5),
        (torch.tensor([[0.5]]), 0.5),
        (torch.tensor([0.5], requires_grad=True), 0.5),
        (torch.tensor([1], dtype=torch.int64), 1.0),
        ([torch.tensor(0.5)], 0.5),
        (np.array([0.5]), 0.5),
        (Fraction(1, 2), 0.5),
        (10**400, math.inf),
        (torch.tensor([0.5], dtype=torch.bfloat16), 0.5),
        (np.float32(0.5), 0.5),
    ],
    ids=str,
)
def test_one_number_is_a_score(returned, value):
    assert Oracle(lambda a, b: returned, 2).score(ITEM, 0, PROMPTS[:2], TEXTS[:2]).value == value


def scored(a, b):
    return RETURNED[0]


RETURNED: list = [None]
NO_SCORES = [
    None, [], torch.tensor([]), "high", "0.5", object(), [None], [0.5, 9.0], torch.tensor([0.5, 9.0]), [[0.5]], [[]],
    {"r": 1.0},
    1j, b"1", [torch.tensor(0.5), 1], np.array(["a"]), {0.5}, lambda: 1.0,
]  # fmt: skip


@pytest.mark.parametrize("returned", NO_SCORES, ids=lambda returned: type(returned).__name__)
def test_anything_but_one_number_names_function_file_and_task(returned, monkeypatch):
    monkeypatch.setitem(globals(), "RETURNED", [returned])
    line = scored.__code__.co_firstlineno
    for on_error in ("function", "processor"):
        what = r"task 7: the reward " + on_error
        oracle = Oracle(scored, 2) if on_error == "function" else Oracle(lambda a, b: 1.0, 2, lambda raw: RETURNED[0])
        place = rf"scored \(test_prompts_oracle.py, line {line}\)" if on_error == "function" else ".*lambda.*"
        with pytest.raises(OracleResultError, match=rf"{what} {place} returned .* for one joint response; return one number"):
            oracle.score(ITEM, 7, PROMPTS[:2], TEXTS[:2])


@given(
    st.recursive(
        st.none()
        | st.booleans()
        | st.integers()
        | st.floats()
        | st.text(max_size=3)
        | st.binary(max_size=2)
        | st.complex_numbers(),
        lambda inner: st.lists(inner, max_size=3) | st.tuples(inner) | st.dictionaries(st.text(max_size=2), inner, max_size=2),
        max_leaves=4,
    )
)
def test_any_result_is_one_score_or_one_line(returned):
    try:
        score = Oracle(lambda a, b: returned, 2).score(ITEM, 7, PROMPTS[:2], TEXTS[:2])
    except OracleResultError as error:
        assert str(error).startswith("task 7: the reward function") and "\n" not in str(error)
        flat = returned if isinstance(returned, list | tuple) else [returned]
        assert len(flat) != 1 or not isinstance(flat[0], int | float)
        return
    (number,) = returned if isinstance(returned, list | tuple) else (returned,)
    assert score.raw == float(number) or math.isnan(score.raw)


@pytest.mark.parametrize("error", [SystemExit(0), SystemExit("bye"), RecursionError(), MemoryError(), UnicodeError("x")])
def test_whatever_a_function_raises_is_a_line(error):
    def ends(a, b):
        raise error

    place = r"ends \(test_prompts_oracle.py, line \d+\)"
    with pytest.raises(OracleError, match=rf"^task 7: the reward function .*{place} raised {type(error).__name__}"):
        Oracle(ends, 2).score(ITEM, 7, PROMPTS[:2], TEXTS[:2])


@pytest.mark.parametrize("returned", [[], "high"], ids=str)
def test_what_is_no_score_is_refused_by_task(returned):
    with pytest.raises(OracleError, match="task 7"):
        Oracle(lambda a, b: returned, 2).score(ITEM, 7, PROMPTS[:2], TEXTS[:2])


@pytest.mark.parametrize("error", [TypeError, ValueError, KeyError, ZeroDivisionError])
def test_a_function_that_raises_is_called_once_and_the_task_is_named(error):
    calls = []

    def broken(a, b):
        calls.append(a)
        raise error("inside")

    with pytest.raises(
        OracleError, match=f"task 7: the reward function .*broken .* raised {error.__name__}: .*inside"
    ) as caught:
        Oracle(broken, 2).score(ITEM, 7, PROMPTS[:2], TEXTS[:2])
    assert len(calls) == 1
    assert isinstance(caught.value.__cause__, error)


def test_the_processor_maps_the_raw_score():
    score = Oracle(lambda a, b: [3.0], 2, lambda x: 2 * x - 1).score(ITEM, 0, PROMPTS[:2], TEXTS[:2])
    assert (score.raw, score.value, score.valid) == (3.0, 5.0, True)
    with pytest.raises(ConfigError, match="reward_processor: 5 is not callable"):
        Oracle(lambda a, b: 0, 2, 5)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_scores_that_are_not_finite_are_invalid(bad):
    assert not Oracle(lambda a, b: bad, 2).score(ITEM, 0, PROMPTS[:2], TEXTS[:2]).valid
    # Neither a processor that hides it nor one that makes it gives a valid score.
    assert not Oracle(lambda a, b: bad, 2, lambda x: 0.0).score(ITEM, 0, PROMPTS[:2], TEXTS[:2]).valid
    assert not Oracle(lambda a, b: 1.0, 2, lambda x: bad).score(ITEM, 0, PROMPTS[:2], TEXTS[:2]).valid


# --- evaluation
def test_evaluation_averages_the_tasks_own_reward(model_folders, tmp_path):
    def reward(first, second, batch_items):
        return [len(first[0].split()) + 0.5 * ("w7" in second[0].split()) + batch_items[0]["bonus"]]

    tasks = [{"prompt": f"w{3 + k} w{9 + k}", "bonus": 10.0 * k} for k in range(3)]
    settings = MADPOConfig(max_new_tokens=[3, 4], eval_num_samples=2, eval_samples_per_item=3, temperature=1.0, top_p=1.0)
    trainer = MADPOTrainer(
        agents=model_folders, eval_dataset=tasks, reward_func=reward, args=settings, run_dir=tmp_path / "run", seed=5,
        rollout={"backend": "transformers", "dtype": "float32"}, verbose=False,
    )  # fmt: skip
    with trainer:
        values = trainer.evaluate()
        (file,) = (tmp_path / "run" / "samples").iterdir()
        written = file.read_bytes()
        answers = json.loads(written)
        assert [a["item"] for a in answers] == [0, 1]
        means = []
        for answer in answers:
            assert len(answer["samples"]) == 3
            scores = [reward(*([[t] for t in s["completions"]]), [tasks[answer["item"]]])[0] for s in answer["samples"]]
            assert scores == [s["reward"] for s in answer["samples"]]
            means.append(sum(scores) / 3)
        assert values["eval/turn_1/reward_mean"] == pytest.approx(sum(means) / 2, abs=1e-12)
        assert values["eval/turn_1/expected_return"] == values["eval/turn_1/reward_mean"]
        assert values["eval/n"] == 2
        # The standard error of two means is half their distance.
        assert values["eval/standard_error"] == pytest.approx(abs(means[0] - means[1]) / 2, abs=1e-12)
        # Evaluating again gives the same file, byte for byte; more tasks extend it.
        assert trainer.evaluate()["eval/turn_1/reward_mean"] == values["eval/turn_1/reward_mean"]
        assert file.read_bytes() == written
        assert trainer.evaluate(99)["eval/n"] == 3
        assert json.loads(file.read_bytes())[:2] == answers
        assert math.isnan(trainer.evaluate(0)["eval/turn_1/reward_mean"])


def test_evaluation_uses_the_users_own_metrics_too(model_folders, tmp_path):
    seen = []

    def logger(agent_completions_turns, batch_items, prompts):
        seen.append((agent_completions_turns, batch_items, prompts))
        return [{"length": len(turns[0])} for turns in agent_completions_turns[0]]

    def aggregator(rows, num_turns):
        assert num_turns == 1
        return {"longest": max(row["length"] for row in rows)}

    trainer = MADPOTrainer(
        agents=model_folders, eval_dataset=[{"prompt": "w3"}], reward_func=lambda a, b: 1.0, run_dir=tmp_path / "run",
        args=MADPOConfig(max_new_tokens=3, eval_samples_per_item=2), rollout={"backend": "transformers", "dtype": "float32"},
        eval_logger=logger, eval_aggregator=aggregator, verbose=False,
    )  # fmt: skip
    with trainer:
        values = trainer.evaluate()
    ((turns, items, prompts),) = seen
    assert (len(turns), [len(t) for t in turns], items, prompts) == (2, [2, 2], [{"prompt": "w3"}] * 2, ["w3"] * 2)
    assert values["eval/longest"] == max(len(t[0]) for t in turns[0])
    assert values["eval/turn_1/reward_mean"] == 1.0
