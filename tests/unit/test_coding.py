"""The coding task: its scores by hand, and what hostile code can do in its sandbox: nothing."""

from __future__ import annotations

import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import psutil
import pytest

from comlrl_ds.preference.oracle import Oracle
from comlrl_ds.tasks import coding, explain
from comlrl_ds.tasks.sandbox import Limits, Outcome, SandboxError, _filter, pack, run_tests, unpack

SHORT = Limits(cpu_seconds=1, wall_seconds=15.0, memory_bytes=128 << 20)


def run(program, *tests, setup="", limits=SHORT):
    """Outcome of a program that defines f; by default it should return 1."""
    return run_tests(program, "f", tests or ["assert candidate() == 1"], setup, limits)


def value_of(program, expected, limits=SHORT):
    """Assert what f() returns, and that nothing was broken."""
    assert run(program, f"assert candidate() == {expected!r}, candidate()", limits=limits) == Outcome((True,), "", "")


def failed(error="", violation=""):
    return Outcome((False,), error, violation)


# --- scores
CLOSE = {"task_id": "HumanEval/0", "entry_point": "has_close_elements", "prompt": "…"}
AUX = "def aux(numbers, threshold):\n    return sorted(numbers)\n"
GOOD = """def has_close_elements(numbers: List[float], threshold: float) -> bool:
    ordered = aux(numbers, threshold)
    return any(b - a < threshold for a, b in zip(ordered, ordered[1:]))
"""
ALONE = GOOD.replace("aux(numbers, threshold)", "sorted(numbers)")
YES = "def has_close_elements(numbers, threshold):\n    return True\n"


def parts(helper, main, item=CLOSE):
    return tuple(coding.reward_parts(helper, main, item).values())


@pytest.mark.parametrize(
    ("helper", "main", "expected"),
    [
        (AUX, GOOD, (0.2, 0.2, 0.2, 1.4)),
        (AUX, ALONE, (0.2, 0.2, 0.0, 1.4)),
        ("", ALONE, (0.0, 0.2, 0.0, 1.4)),
        ("", GOOD, (0.0, 0.2, 0.0, 0.0)),
        (AUX, YES, (0.2, 0.2, 0.0, 1.4 * 4 / 7)),  # of seven expected values four are True
        (AUX, "", (0.2, 0.0, 0.0, 0.0)),
        (AUX, GOOD.replace("any(", "any((", 1), (0.2, 0.0, 0.0, 0.0)),
        (AUX.replace("):", ")"), ALONE, (0.0, 0.2, 0.0, 1.4)),  # a broken helper does not break the main function
        (AUX.replace("aux", "other"), GOOD, (0.0, 0.2, 0.0, 0.0)),
        (AUX, AUX + GOOD, (0.2, 0.2, 0.0, 1.4)),  # calls its own helper
        (AUX, "aux = sorted\n" + ALONE.replace("sorted(", "aux("), (0.2, 0.2, 0.0, 1.4)),
        (AUX, GOOD.replace("has_close_elements", "close"), (0.2, 0.0, 0.0, 0.0)),
        ("raise ValueError\n" + AUX, GOOD, (0.2, 0.2, 0.2, 0.0)),  # no violation, but no test passes
        ("def aux(*_):\n    raise ValueError\n", GOOD, (0.2, 0.2, 0.2, 0.0)),
        ("import nonesuch\n" + AUX, GOOD, (0.2, 0.2, 0.2, 0.0)),
        ("async " + AUX, GOOD, (0.0, 0.2, 0.0, 0.0)),
        ("open('/etc/hostname')\n" + AUX, GOOD, (0.0,) * 4),
        (AUX, "import sys\nsys.exit(0)\n" + GOOD, (0.0,) * 4),
        ("def aux(*_):\n    return [0] * 50_000_000\n", GOOD, (0.0,) * 4),
        (AUX, "x = 1 + " * 3000 + "1\n" + GOOD, (0.2, 0.0, 0.0, 0.0)),  # longer than an answer may be
        (AUX, GOOD.replace("any(", "\0any("), (0.2, 0.0, 0.0, 0.0)),
    ],
)
def test_scores_by_hand(helper, main, expected):
    assert parts(helper, main) == pytest.approx(expected, abs=1e-12)
    assert 0.0 <= sum(expected) <= 2.0


def test_the_oracle_calls_the_reward():
    oracle = Oracle(coding.reward, 2)
    assert oracle.score(CLOSE, 3, ["", ""], [AUX, GOOD]).value == pytest.approx(2.0)
    assert coding.reward([AUX, ""], [GOOD, ""], [CLOSE, CLOSE]) == pytest.approx([2.0, 0.0])
    assert coding.reward.reward_range == (0.0, 2.0)


def test_an_unknown_problem_is_an_error():
    with pytest.raises(KeyError, match="HumanEval/164"):
        coding.reward([""], [""], [{"task_id": "HumanEval/164"}])


@pytest.mark.parametrize(
    ("task", "share"),
    [
        ("HumanEval/38", 1.0),  # encode_cyclic stands in the prompt; one random test
        ("HumanEval/33", 1.0),  # the tests call the solution
        ("HumanEval/151", 1.0),  # an assignment between the asserts
        ("HumanEval/75", 1.0),  # the slowest
    ],
)
def test_solutions_of_the_package_pass(task, share):
    raw = coding._problems()[task]
    code = raw["prompt"] + raw["canonical_solution"]
    assert parts("", code, {"task_id": task})[3] == pytest.approx(1.4 * share)


def test_every_statement_that_tests_the_function_is_a_test():
    problems = [coding._problem(task) for task in coding._problems()]
    assert len(problems) == 164
    assert all(p.tests and all("candidate" in test and "assert" in test for test in p.tests) for p in problems)
    assert sum(len(p.tests) == 1 for p in problems) == 4  # 32, 34, 38, 50
    # Of 53: five asserts and a loop. Wrong from 1000 on: only the loop finds out.
    adds = "def add(x, y):\n    return x + y if x + y < 1000 else 0\n"
    assert parts("", adds, {"task_id": "HumanEval/53"})[3] == pytest.approx(1.4 * 5 / 6)
    # sort_third unchanged: the package compares the solution with itself; here with the reference.
    assert parts("", "def sort_third(x):\n    return x\n", {"task_id": "HumanEval/33"})[3] == pytest.approx(1.4 / 7)


def test_items_are_those_of_explain_and_prompts_name_the_functions():
    assert coding.train_items() == explain.train_items()
    assert coding.eval_items() == explain.eval_items()
    for item in coding.eval_items()[:5]:
        for form in coding.formatters:
            ((role, text),) = [tuple(message.values()) for message in form(item)]
            assert role == "user"
            assert all(word in text for word in ("`aux`", f"`{item['entry_point']}`", item["prompt"].strip()))


# --- code in answers
FENCED = "```python\n" + AUX + "```"


@pytest.mark.parametrize(
    "answer",
    [
        AUX,
        FENCED,
        f"Sure! Here is it:\n\n{FENCED}\n\nIt sorts, from the smallest = first.",
        f"~~~\n```\n{AUX}",  # never closed
        f"1. Define:\n\n   {FENCED}".replace("\n", "\n   "),
        "```sh\npip install x\n```\n```py\n" + AUX + "```",
        "```python\nimport os\n```\nand\n```\n" + AUX + "```",
        f"The helper is:\n{AUX}\nIt sorts. Note that import is not needed.",
        f"As follows.\n\nimport math\n\n{AUX}# done\n\nYes.",
        f"x = '''\n```\n'''\n{AUX}",
        '"\\d"\n' + AUX,
    ],
)
def test_code_is_found_in_answers(answer):
    code = coding.extract(answer, "aux")
    names: dict[str, object] = {}
    exec(code, names)
    assert names["aux"]([2, 1], 0) == [1, 2]


@pytest.mark.parametrize("answer", ["", "no code", "def aux(x:", "class A:\n    def aux(self): pass", "```\n```", "aux = 3"])
def test_no_code_is_found_where_there_is_none(answer):
    assert coding.extract(answer, "aux") == ""


@pytest.mark.parametrize("unit", ["(", "-", "a.", "1+", "lambda:", "not ", "f'{", "if 1:\n ", "```\n", "'''", "\ud800", "x,"])
def test_hostile_text_is_read_without_harm(unit):
    text = "x = " + unit * (19_900 // len(unit))
    started = time.process_time()
    assert coding.extract(text + "\n", "aux") == ""
    assert time.process_time() - started < 3


def test_reading_runs_nothing(tmp_path):
    mark = tmp_path / "ran"
    coding.extract(f"open({str(mark)!r}, 'w')\n{AUX}", "aux")
    assert parts(f"open({str(mark)!r}, 'w')\n{AUX}", "nothing") == (0.2, 0.0, 0.0, 0.0)
    assert not mark.exists()


# --- the sandbox: honest programs
def test_each_test_counts_and_exceptions_fail_only_theirs():
    program = "def f(x):\n    return 10 // x"
    assert run(program, "assert candidate(5) == 2", "assert candidate(0) == 1", "assert candidate(x=10) == 1") == Outcome(
        (True, False, True), "ZeroDivisionError", ""
    )
    assert run("f = 3").error == "TypeError"
    assert run("x = 3").error == "KeyError"
    assert run("def f(").error == "SyntaxError"


def test_setup_is_for_the_tests_only():
    assert run(
        "def f():\n    return 'y' in globals()", "assert candidate() is False and y == 2", setup="print(1)\ny = 2"
    ).passed == (True,)
    with pytest.raises(SandboxError, match=r"no generated code was run: .*ZeroDivisionError"):
        run("def f(): return 1", setup="1 / 0")


@pytest.mark.parametrize(
    "value",
    [None, True, -(10**30), 0.1, "é\ud800\n", [1, [2.0, None]], (1, (2,)), {1, (2, 3)}, {"a": {1: (True,)}, (1,): []}, []],
)  # fmt: skip
def test_plain_data_passes_both_ways(value):
    again = unpack(pack(value))
    assert (again, repr(again)) == (value, repr(value))


def test_plain_data_keeps_its_types_between_the_processes():
    value = [None, True, 1, 1.0, "é", (1, [2]), {3}, {"a": (4,), 5: []}]
    assert run(
        "def f(x):\n    return x, repr(x)", f"x = {value!r}\nassert repr(candidate(x)) == repr((x, repr(x)))"
    ).passed == (True,)


def test_modules_are_there_and_runs_repeat():
    program = (
        "import random, math, collections.abc, datetime\nfrom os import path\n"
        "def f():\n    import heapq\n    year = datetime.datetime.strptime('2001', '%Y').year\n"
        "    return [random.random(), hash('a'), year, heapq.nlargest(1, [1, 2]), path.join('a', 'b')]"
    )
    tests = ["seen = candidate()\nassert seen[2:] == [2001, [2], 'a/b']"]
    before = random.getstate()
    assert run(program, *tests).passed == (True,)
    values = "import random\ndef f(): return [random.random(), hash('a')]"
    random_first = random.Random(0).random()
    assert run(values, f"assert candidate()[0] == {random_first!r}").passed == (True,)
    hashes = subprocess.run(
        [sys.executable, "-c", "print(hash('a'))"], env={"PYTHONHASHSEED": "0"}, capture_output=True, text=True, check=True
    ).stdout
    assert run(values, f"assert candidate()[1] == {hashes}").passed == (True,)
    assert random.getstate() == before
    assert run("import numpy").error == "ModuleNotFoundError"


def test_runs_are_independent_in_threads():
    with ThreadPoolExecutor(4) as pool:
        outcomes = list(pool.map(lambda i: run(f"def f(): return {i}", f"assert candidate() == {i}"), range(8)))
    assert outcomes == [Outcome((True,), "", "")] * 8


# --- hostile programs: each costs one zero
@pytest.mark.parametrize(
    ("program", "violation"),
    [
        ("def f():\n    while True: pass", "cpu"),
        ("while True: pass", "cpu"),
        (
            "import signal\nsignal.signal(signal.SIGXCPU, signal.SIG_IGN)\ndef f():\n    while True:\n"
            "        try:\n            while True: pass\n        except BaseException: pass",
            "cpu",
        ),
        ("def f(): return bytearray(10 * 2**30)", "memory"),
        ("x = [0] * 50_000_000", "memory"),
        ("def f(): return [bytearray(1 << 20) for _ in range(300)] and 1", "memory"),
        ("def f():\n    for _ in range(10**6): print('x' * 1000)\n    return 1", "output"),
        ("import sys\nfor _ in range(10**6): print('x' * 1000, file=sys.stderr)\ndef f(): return 1", "output"),
        ("def f(): return 'x' * 100_000", "output"),
        ("def f(): return [0] * 10**5", "output"),
        ("import os\nos._exit(0)", "exit"),
        ("import os\ndef f(): os._exit(0)", "exit"),
        ("def f(): raise SystemExit(0)", "exit"),
        ("import sys\nsys.exit()\ndef f(): return 1", "exit"),
        ("import os\ndef f():\n    os.close(3)\n    os.close(4)\n    return 1", "exit"),
        ("import os\ndef f(): os.abort()", None),
        ("import os\ndef f(): os.kill(os.getppid(), 9)", "os"),
        ("import os\ndef f(): os.killpg(0, 9)", "os"),
        ("import os\nos.fork()\ndef f(): return 1", "os"),
        ("import subprocess\ndef f(): subprocess.run(['true'])", "os"),
        ("def f(): return len(open('/etc/passwd').read())", "os"),
        ("def f(): return open('/tmp/comlrl-ds-planted', 'w')", "os"),
        ("import os\nos.setuid(0)\ndef f(): return 1", "os"),
        ("import os, signal\ndef f(): os.setsid()", "os"),
        ("import os\ndef f(): os.nice(-5)", "os"),
    ],
)
def test_a_hostile_program_passes_nothing(program, violation):
    outcome = run(program, "assert candidate() == 1", "assert True")
    assert outcome.passed[0] is False
    if violation is None:
        assert outcome.violation.startswith("signal ")
    else:
        assert outcome.violation == violation
    assert outcome.passed[1] is False


def test_a_sleeper_ends_on_time_and_leaves_no_process():
    me, seen = psutil.Process(), {}
    before = {p.pid for p in me.children(recursive=True)}

    def watch():
        while not seen.get("stop"):
            seen.update({p.pid: p for p in me.children(recursive=True) if p.pid not in before})
            time.sleep(0.05)

    watcher = threading.Thread(target=watch)
    watcher.start()
    outcome = run("import time\ndef f(): time.sleep(1000)", limits=SHORT._replace(wall_seconds=1.0))
    seen["stop"] = True
    watcher.join()
    del seen["stop"]
    assert outcome == failed(violation="wall")
    assert len(seen) == 2  # grader and child
    assert not any(p.is_running() for p in seen.values())


def test_nothing_outlives_a_killed_trainer():
    code = (
        "from comlrl_ds.tasks.sandbox import *\nprint(1, flush=True)\n"
        "run_tests('import time\\ntime.sleep(1000)', 'f', ['1'], limits=Limits(wall_seconds=2.0))"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as trainer:
        assert trainer.stdout.readline() == b"1\n"
        found: list[psutil.Process] = []
        until = time.monotonic() + 2
        while len(found) < 2 and time.monotonic() < until:
            found = psutil.Process(trainer.pid).children(recursive=True)
            time.sleep(0.02)
        assert found
        trainer.send_signal(signal.SIGKILL)
    assert psutil.wait_procs(found, timeout=10)[1] == []


def test_no_process_or_thread_can_be_started():
    # Whatever starts ends at once, should this fail.
    program = """
import os, subprocess, threading
def f():
    started = 0
    for _ in range(20):
        for start in (os.fork, lambda: subprocess.Popen(['true']).pid, lambda: threading.Thread(target=int).start() or 1):
            try:
                if start() == 0:
                    os._exit(0)
                started += 1
            except (OSError, RuntimeError):
                pass
    return started
"""
    value_of(program, 0)


def test_no_signal_reaches_another_process():
    with subprocess.Popen(["sleep", "30"]) as other:
        program = f"""
import os, signal
def f():
    sent = []
    for pid, number in (({other.pid}, 15), ({os.getpid()}, 0), (os.getpid(), 0)):
        try:
            os.kill(pid, number)
            sent.append(pid)
        except PermissionError:
            pass
    return sent
"""
        value_of(program, [])
        assert other.poll() is None
        other.kill()


def test_no_secret_can_be_read(monkeypatch, tmp_path):
    monkeypatch.setenv("PLANTED", "the-secret-word")
    (tmp_path / "file").write_text("the-secret-word")
    program = f"""
import os, sys, io
def f():
    found = list(os.environ)
    for path in ('/proc/self/environ', '/proc/{os.getpid()}/environ', '/proc/{os.getpid()}/mem', '/proc/self/maps',
                 {str(tmp_path / "file")!r}, '/proc/self/fd/0', '/dev/mem', '/', '/proc'):
        for read in (open, os.listdir, os.stat, os.readlink, io.FileIO, os.unlink, os.chdir, os.mkdir):
            try:
                found.append(str(read(path)))
            except OSError:
                pass
    for fd in range(64):
        if fd != 4:
            try:
                found.append(os.read(fd, 100).decode())
            except OSError:
                pass
    return found
"""
    value_of(program, [""])  # /dev/null
    assert (tmp_path / "file").exists()


def test_no_socket_can_be_made():
    with socket.create_server(("127.0.0.1", 0)) as server:
        program = f"""
import socket
def f():
    made = []
    for family in (socket.AF_INET, socket.AF_UNIX, socket.AF_INET6):
        try:
            made.append(str(socket.socket(family)))
        except PermissionError:
            pass
    try:
        socket.create_connection(('127.0.0.1', {server.getsockname()[1]}), 1)
    except Exception:
        return made
"""
        value_of(program, [])
        server.settimeout(0.05)
        with pytest.raises(TimeoutError):
            server.accept()


def test_root_becomes_nobody():
    value_of("import os\ndef f(): return os.getuid()", 65534 if os.getuid() == 0 else os.getuid())


@pytest.mark.skipif(os.getuid() != 0, reason="needs root to become another user")
def test_another_user_is_confined_alike():
    code = (
        "import os\nfrom comlrl_ds.tasks.sandbox import *\nassert os.getuid() == 65533\n"
        "for p in ['import os\\ndef f(): return os.getuid()', 'f = open(\"/proc/1/stat\")', 'import os\\nos.fork()',\n"
        "          'import os\\nos.kill(os.getppid(), 9)', 'import socket\\nsocket.socket()']:\n"
        "    print(run_tests(p, 'f', ['assert candidate() == 65533']).violation or 'ok')"
    )
    # The right to read is for an interpreter in root's home; the child must not make use of it.
    caps = ["--inh-caps=+dac_read_search", "--ambient-caps=+dac_read_search"]
    user = ["setpriv", "--reuid=65533", "--regid=65533", "--clear-groups", *caps]
    done = subprocess.run([*user, sys.executable, "-c", code], capture_output=True, text=True)
    if "setpriv" in done.stderr:
        pytest.skip(done.stderr)
    assert (done.stdout.split(), done.stderr) == (["ok", "os", "os", "os", "os"], "")


# --- forgers
@pytest.mark.parametrize(
    "program",
    [
        # what the grader would say
        'print(\'{"passed": [true], "error": "", "violation": ""}\', flush=True)\ndef f(): return 2',
        'import os\ndef f():\n    os.write(1, b\'{"passed": [true], "error": "", "violation": ""}\\n\')\n    return 2',
        # objects that equal everything
        "class All(int):\n    def __eq__(self, other): return True\n    __hash__ = int.__hash__\ndef f(): return All(2)",
        "class All:\n    def __eq__(self, other): return True\ndef f(): return All()",
        # other meanings of what the child uses
        "import builtins, json, sys\nbuiltins.AssertionError = ValueError\nbuiltins.isinstance = lambda *a: True\n"
        "json.dumps = lambda *a: '{\"value\": true, \"passed\": [true]}'\ndef f(): return 2",
        "import builtins\nbuiltins.AssertionError = BaseException\nbuiltins.compile = builtins.exec = print\ndef f(): return 2",
        "import sys, json\nfor n in list(sys.modules): sys.modules[n] = None\ndef f(): return 2",
        # swallow everything
        "def f():\n    try:\n        raise AssertionError\n    except BaseException:\n        return 2",
        "import sys\nsys.excepthook = lambda *a: None\nsys.settrace(lambda *a: None)\ndef f(): assert False",
        "import os\ndef f():\n    os.write(3, b'{\"value\": 2}\\n' * 3)\n    return 1",
    ],
)  # fmt: skip
def test_a_verdict_cannot_be_forged(program):
    assert run(program, "assert candidate() == 1 and candidate() is not True").passed == (False,)


def test_the_tests_are_nowhere_in_the_child():
    # Words are looked for backwards, so that the search does not find itself. The program finds its own text.
    program = """
import gc, sys
def f(backwards):
    frame, seen = sys._getframe(), []
    while frame:
        seen += [frame.f_locals, frame.f_globals]
        frame = frame.f_back
    seen += [x for x in gc.get_objects() if x is not seen]
    for x in seen:
        if isinstance(x, dict):
            seen += [str(v) for v in list(x.values()) if type(v) in (str, bytes)]
    return any(isinstance(x, str) and backwards in x[::-1] for x in seen)
# own-words
"""
    tests = ["assert candidate('sdrow-nwo')", "assert not candidate('kcatsyah-eldeen')", "assert not candidate('puteseldeen')"]
    assert run(program, *tests, "'needle-haystack'", setup="x = 'needlesetup'").passed == (True,) * 4


@pytest.mark.parametrize(
    "message",
    ["x", "[]", "3", "{}", '{"error": ""}', '{"value": ["set", ["list"]]}', '{"value": ["nonesuch"]}', '{"value": {}}',
     '{"value": []}', '{"error": 3, "violation": ["os"]}', '{"refused": "no"}', '{"error": "e", "violation": "cpu"}',
     "[" * 60_000, "9" * 9999, "\\xff"],
)  # fmt: skip
@pytest.mark.parametrize("where", ["start", "call"])
def test_nonsense_in_the_pipe_is_the_programs_failure(message, where):
    write = (
        f"os.write(3, b'{message}\\n')" if len(message) < 10_000 else f"os.write(3, b'{message[0]}' * {len(message)} + b'\\n')"
    )
    program = (
        f"import os\n{write}\ndef f(): return 1" if where == "start" else f"import os\ndef f():\n    {write}\n    return 1"
    )
    assert run(program).passed == (False,)


# --- where there is no filter
@pytest.mark.parametrize(("platform", "machine"), [("darwin", "arm64"), ("linux", "riscv64"), ("win32", "AMD64")])
def test_without_a_filter_nothing_is_run(platform, machine):
    with pytest.raises(SandboxError, match=f"{platform} on {machine}"):
        _filter(platform, machine)


def test_the_filter_allows_by_number_and_machine():
    for machine, (column, getpid) in {"x86_64": (0, 39), "aarch64": (1, 172)}.items():
        steps = _filter("linux", machine)
        allowed = [k for code, _, miss, k in steps if code == 0x15 and miss == 1]
        assert getpid in allowed and len(set(allowed)) == len(allowed) == 33 - column
        assert steps[-1] == (0x06, 0, 0, 0x00050001)
        # None of open, openat, socket, clone, fork, execve, kill, ptrace.
        forbidden = [{2, 257, 41, 56, 57, 59, 62, 101, 435}, {56, 198, 220, 221, 129, 117, 435}][column]
        assert not forbidden & set(allowed)
