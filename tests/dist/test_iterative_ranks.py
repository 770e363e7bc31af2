"""Every iterative example on three ranks in two groups, in one launch, against the same in one process."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

from launch import HERE, free_port
from test_launcher import environment

E2E = HERE.parent / "e2e"
PLACEMENT = {
    "groups": {"left": [0, 1], "right": [2]},
    "roles": {"actor.0": {"group": "left"}, "actor.1": {"group": "right"}, "rollout": {"group": "right"}},
}  # fmt: skip
# The comparators of this one sample on ranks of their own.
APART = PLACEMENT | {"roles": PLACEMENT["roles"] | {"comparator": {"group": "left"}}}
# The reward model, the critics and one reference sharded over the first two ranks, at another stage than the actor there.
SHARDED = {"group": "left", "deepspeed": {"zero_optimization": {"stage": 3}}}
JUDGED = {
    "groups": PLACEMENT["groups"],
    "roles": PLACEMENT["roles"] | {
        "reward_model": SHARDED, "critic": SHARDED, "reference.0": SHARDED, "reference.1": {"group": "right"},
    },
}  # fmt: skip
NAMES = ["iter_current", "iter_current_copy", "iter_model", "iter_history", "iter_api", "iter_centralized"]
NAMES += ["marlhf", "marlhf_maac", "marlhf_iac_heads", "iter_lora", "marlhf_lora"]
# LoRA of agents at different stages: on a base that is sharded, and on one that is not.
LORA = {"groups": PLACEMENT["groups"], "roles": PLACEMENT["roles"] | {"actor.0": SHARDED}}
OWN = {
    "iter_current_copy": APART,
    "iter_lora": LORA,
    "marlhf_lora": LORA | {"roles": LORA["roles"] | {"reward_model": SHARDED}},
}
OWN |= dict.fromkeys(["marlhf", "marlhf_maac", "marlhf_iac_heads"], JUDGED)


@pytest.fixture(scope="module")
def walked(tmp_path_factory, tiny_model, root):
    """Folders of the runs of three ranks and of one process."""
    import sys

    sys.path.insert(0, str(E2E))
    from messages_server import messages_server
    from tiny import save_tiny_model
    from walk_examples import walk

    folder = tmp_path_factory.mktemp("ranks")
    other = save_tiny_model(folder / "other", 9, layers=1)
    with messages_server() as (url, _), pytest.MonkeyPatch.context() as patch:
        patch.setenv("ANTHROPIC_API_KEY", "sk-planted-0123456789")
        settings = {
            "models": [str(tiny_model), str(other)], "folder": str(folder / "three"), "url": url, "names": NAMES,
            "sections": [f"placement={json.dumps(PLACEMENT)}", "rollout.engines=1"],
            "own": {name: [f"placement={json.dumps(placement)}"] for name, placement in OWN.items()},
        }  # fmt: skip
        command = ["deepspeed", "--num_gpus", "3", "--master_port", str(free_port()), "--no_local_rank"]
        done = subprocess.run(
            [*command, str(E2E / "walk_examples.py"), json.dumps(settings)], cwd=folder, capture_output=True, text=True,
            env=environment(root) | {"PYTHONPATH": os.pathsep.join([str(E2E), str(root)])}, timeout=1200, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
        walk(
            {"models": settings["models"], "folder": str(folder / "one"), "url": url, "names": ["iter_current", "iter_history"]}
        )
    return folder / "three", folder / "one"


def rounds(run: Path) -> list[str]:
    return [f.read_text() for f in sorted(run.glob("preference_replay/iteration_*.json"))]


@pytest.mark.parametrize("name", NAMES)
def test_three_ranks_finish_every_example(walked, name):
    run = walked[0] / name
    contents = [json.loads(text) for text in rounds(run)]
    count = 1 if name.startswith("marlhf") else 3
    assert [c["iteration"] for c in contents] == list(range(1, count + 1)) and all(c["num_pairs"] for c in contents)
    weights = "adapter_model" if "lora" in name else "model"
    assert (run / f"final/agent_1/{weights}.safetensors").exists() and (run / "complete").read_text() == str(count)


@pytest.mark.parametrize("name", ["iter_current", "iter_history"])
def test_the_first_round_is_that_of_one_process(walked, name):
    """The same weights give the same pairs; later rounds follow weights that differ in their last bits."""
    three, one = (rounds(folder / name) for folder in walked)
    assert three[0] == one[0]


def test_comparators_on_ranks_of_their_own_hold_the_current_weights(walked):
    rows = [json.loads(x) for x in (walked[0] / "iter_current_copy/metrics.jsonl").read_text().splitlines()]
    compared = [r for r in rows if "iter/comparator_weights/agent_0" in r]
    assert len(compared) == 3
    for row in compared:
        for i in range(2):
            assert row[f"iter/comparator_weights/agent_{i}"] == row[f"iter/weights/agent_{i}"]
