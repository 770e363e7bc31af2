"""Ranks of a hostfile: in its order, numbered as the launcher numbers them."""

from __future__ import annotations

import base64
import json
import subprocess
import sys
import time

import pytest
from run_files import problems

from comlrl_ds.cluster.hostfile import counted, ranges, slots_of_hostfile, slots_of_one_host
from comlrl_ds.config import ConfigError


def places(slots):
    return [(s.rank, s.host, s.slot) for s in slots]


def hostfile(folder, text):
    file = folder / "hosts"
    file.write_text(text)
    return file


def test_ranks_run_in_file_order_and_local_ranks_may_be_permuted(tmp_path):
    file = hostfile(tmp_path, "# the cluster\n\nb slots=3   # the old one\n\ta  slots=2\nc slots=2\n")
    assert places(slots_of_hostfile(file)) == [
        (0, "b", 0), (1, "b", 1), (2, "b", 2), (3, "a", 1), (4, "a", 0), (5, "c", 1), (6, "c", 0),
    ]  # fmt: skip
    assert places(slots_of_one_host(2)) == [(0, "localhost", 0), (1, "localhost", 1)]
    assert places(slots_of_one_host(1, "me")) == [(0, "me", 0)]


def test_the_launcher_numbers_the_ranks_so(tmp_path):
    """DeepSpeed's own parser and its per-node launcher, on the second host of an uneven file."""
    from deepspeed.launcher.runner import fetch_hostfile

    file = hostfile(tmp_path, "a slots=3\n# comment\nb slots=2\n")
    slots = slots_of_hostfile(file)
    pool = fetch_hostfile(str(file))
    assert {h: sum(s.host == h for s in slots) for h in dict.fromkeys(s.host for s in slots)} == dict(pool)
    script = tmp_path / "say.py"
    script.write_text("import os, pathlib; e = os.environ; pathlib.Path(e['RANK']).write_text(e['LOCAL_RANK'])")
    world = base64.urlsafe_b64encode(json.dumps({h: list(range(n)) for h, n in pool.items()}).encode()).decode()
    command = [sys.executable, "-m", "deepspeed.launcher.launch", f"--world_info={world}", "--node_rank=1", str(script)]
    subprocess.run(command, cwd=tmp_path, check=True, capture_output=True, timeout=120)
    end = time.monotonic() + 10
    while time.monotonic() < end and len(list(tmp_path.glob("[0-9]"))) < 2:
        time.sleep(0.05)
    told = {int(f.name): int(f.read_text()) for f in tmp_path.glob("[0-9]")}
    assert told == {s.rank: s.slot for s in slots if s.host == "b"} == {3: 1, 4: 0}


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("", ["lists no host"]),
        ("# nothing\n\n", ["lists no host"]),
        ("a slots=2\na slots=1\n", [":2: 'a' is listed already"]),
        ("a slots=0\n", [":1: 'a' has no slot"]),
        ("a slots=2\n\na 2\nb slots=x\n", [":3: 'a 2' is not understood; write 'name slots=N'", ":4: 'b slots=x'"]),
        ("a slots=2 max=3\n", [":1: 'a slots=2 max=3' is not understood"]),
    ],
)
def test_what_is_wrong_is_said_with_its_line(tmp_path, text, parts):
    file = hostfile(tmp_path, text)
    with pytest.raises(ConfigError) as caught:
        slots_of_hostfile(file)
    assert {p.path for p in caught.value.problems} == {"--hostfile"}
    assert len(caught.value.problems) == len(parts)
    for problem, part in zip(caught.value.problems, parts):
        assert problem.message.startswith(str(file)) and part in problem.message


def test_a_hostfile_that_is_not_there(tmp_path):
    assert "No such file" in problems(lambda: slots_of_hostfile(tmp_path / "none"))["--hostfile"]


def test_numbers_in_words():
    assert [ranges(n) for n in ([], [4], [2, 1], [0, 1, 2, 6], [1, 3, 5])] == ["", "4", "1 and 2", "0–2 and 6", "1, 3 and 5"]
    assert counted([3], "slot") == "slot 3" and counted((0, 1, 2, 3)) == "ranks 0–3"
