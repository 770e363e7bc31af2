"""Trains every iterative example in launch/examples on tiny models; a script for the launcher, too.

python walk_examples.py JSON, with "models" (two folders), "folder" for the runs, "url" of an API and, for several ranks,
"sections" that replace those of the examples, and "own", those of some by name.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

EXAMPLES = Path(__file__).resolve().parents[2] / "launch" / "examples"
NAMES = [
    "iter_current", "iter_current_copy", "iter_model", "iter_history", "iter_api", "iter_centralized", "centralized",
    "marlhf", "marlhf_mareinforce", "marlhf_marloo", "marlhf_maremax", "marlhf_maac", "marlhf_iac", "marlhf_iac_heads",
    "marlhf_iter", "iter_lora", "marlhf_lora",
]  # fmt: skip
ONE_SHOT = [name for name in NAMES if name.startswith("marlhf") and name != "marlhf_iter"]
ROUNDS = 3


def overrides(name: str, settings: dict[str, Any]) -> list[str]:
    """What makes an example small: tiny models, few tasks, short answers."""
    tiny, other = settings["models"]
    words = [
        f"agents.0.model={tiny}", "task.dataset=tasks_for_tests:items", "task.train_limit=4",
        "task.eval_dataset=tasks_for_tests:items", "task.reward_func=tasks_for_tests:letters",
        "task.formatters=tasks_for_tests:text", "args.preference_num_candidates=4", "args.preference_pairs_per_sample=2",
        "args.temperature=1.0",
        "args.agent_learning_rate=1e-3", "args.train_batch_size=3", "args.eval_num_samples=4", "args.max_grad_norm=null",
        "args.eval_samples_per_item=1", "dtype=float32", "deepspeed=null", "rollout.backend=transformers",
        "rollout.max_model_len=128", f"run.dir={settings['folder']}/{name}", "run.seed=5",
    ]  # fmt: skip
    if name not in ONE_SHOT:
        words += [f"args.num_iterations={ROUNDS}", "args.comparator_num_candidates=3"]
    if name.startswith("marlhf"):
        words += ["args.reward_learning_rate=1e-3", "args.reward_eval_fraction=0.25"]
        words.append(f"args.rollout_buffer_size={8 if 'ac' in name else 3}")
    words.append(f"args.max_new_tokens={16 if name == 'centralized' else '[8, 10]'}")
    if name != "centralized":
        words.append(f"agents.1.model={tiny}")
    if "centralized" in name:
        words.append("task.centralized_comparator_adapter=tasks_for_tests:Halves")
    if name == "iter_centralized":  # letters() has no range of its own
        words += ["task.reward_func=tasks_for_tests:ranged_letters"]
    if name in ("iter_model", "iter_centralized"):
        words.append(f"args.comparator_model_name={other}")
    if name == "iter_history":
        words.append("args.preference_replay_sample_size=7")
    if name == "iter_api":
        words += [f"args.comparator_api_url={settings['url']}", "args.comparator_api_backoff=0.01"]
    return words


def walk(settings: dict[str, Any]) -> None:
    """Trains them, one after the other."""
    from comlrl_ds.config.run_file import load_run_file
    from comlrl_ds.trainers.from_file import build_trainer

    for name in settings.get("names", NAMES):
        file = EXAMPLES / f"{name}.yaml"
        words = overrides(name, settings)
        if name != "centralized":
            words += settings.get("sections", [])
        words += settings.get("own", {}).get(name, [])
        run_file = load_run_file(file, words)
        with build_trainer(run_file, file, verbose=False) as trainer:
            trainer.train()


if __name__ == "__main__":
    walk(json.loads(sys.argv[1]))
