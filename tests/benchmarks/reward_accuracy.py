"""Does the joint reward model learn more than lengths? Accuracy on held-out pairs of `explain`; see README.md here."""

from __future__ import annotations

import argparse
import gc
import hashlib
import itertools
import json
import os
import re
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any

import numpy as np
from length_baseline import Sides, clustered, length_only, right

if TYPE_CHECKING:
    from comlrl_ds.preference.records import PreferencePair
    from comlrl_ds.trainers.preference import MARLHFTrainer

HERE = Path(__file__).resolve().parent
AGENTS, ROUND = 2, 1
SAMPLING = {"temperature": 0.8, "top_p": 1.0, "top_k": None}
# As launch/examples/marlhf.yaml.
STEPS = {"max_grad_norm": 1.0, "max_tokens_per_micro_batch": 1024}
DEEPSPEED = HERE.parent.parent / "ds_configs" / "zero2.json"


def lengths_of(pairs: Sequence[PreferencePair]) -> dict[str, Sides]:
    """Lengths of both sides in each unit. The tokens are those that were sampled, stop token included."""

    def table(rows: list[list[int]]) -> np.ndarray:
        return np.array(rows, dtype=float).reshape(-1, AGENTS)

    def of_texts(count: Any) -> Sides:
        sides = ([p.winner_completions for p in pairs], [p.loser_completions for p in pairs])
        first, second = (table([[count(text) for text in texts] for texts in side]) for side in sides)
        return first, second

    tokens = [table([[len(getattr(t, side)) for t in p.tokens] for p in pairs]) for side in ("winner", "loser")]
    words = of_texts(lambda t: len(re.findall(r"[a-z']+", t.lower())))  # as the task's oracle counts them
    return {"tokens": (tokens[0], tokens[1]), "words": words, "characters": of_texts(len)}


# --- pairs and the fit, by the trainer's own parts
def make_trainer(options: argparse.Namespace, folder: Path, seed: int, **settings: Any) -> MARLHFTrainer:
    """A trainer whose folder may hold a run to go on with; it loads no model before it has to."""
    from comlrl_ds.tasks import explain
    from comlrl_ds.trainers.preference import MARLHFConfig, MARLHFTrainer

    args = MARLHFConfig(
        num_agents=AGENTS, pair_selection="all", preference_num_candidates=options.candidates,
        preference_pairs_per_sample=None, max_new_tokens=options.max_new_tokens, eval_interval=0,
        **SAMPLING, **STEPS, **settings,
    )  # fmt: skip
    return MARLHFTrainer(
        agent_model=str(options.model.resolve()), args=args, reward_func=explain.reward, formatters=explain.formatters,
        train_dataset=[*explain.train_items(), *explain.eval_items()][: options.tasks], deepspeed=str(DEEPSPEED),
        run_dir=folder, seed=seed, verbose=False, resume="auto", rollout={"backend": options.rollout},
    )  # fmt: skip


def pairs_of(options: argparse.Namespace, folder: Path, seed: int) -> list[PreferencePair]:
    """The seed's pairs: read back where its collection is complete in `folder`, else collected, on from its journal."""
    from comlrl_ds.engines.loading import load_tokenizer
    from comlrl_ds.preference.journal import read_journal
    from comlrl_ds.preference.round_files import RoundFolder
    from comlrl_ds.rollout.base import Sampling
    from comlrl_ds.runs.run_dir import RunDir

    run = RunDir(folder)
    known = read_journal(run.journal(ROUND))
    if ROUND not in known.sealed:
        started = time.perf_counter()
        with make_trainer(options, folder, seed) as trainer:
            collected = trainer.collect_preferences(Sampling(**SAMPLING), ROUND, known)
        say(f"seed {seed}: {len(collected.pairs)} pairs, {collected.ties} ties, {time.perf_counter() - started:.0f} s")
    # Not through a trainer: it refuses a folder whose settings differ, and later versions have others.
    tokenizers = [load_tokenizer(str(options.model.resolve()), "--model")] * AGENTS
    return RoundFolder(run.replay, tokenizers).sampled(ROUND)


def some_of(pairs: Sequence[PreferencePair], per_task: int, which: str, seed: int) -> list[PreferencePair]:
    """Of all pairs of each task as many: drawn at random, or those whose scores differ most."""
    kept = []
    for item, own in itertools.groupby(sorted(pairs, key=lambda p: p.item), key=lambda p: p.item):
        found = list(own)
        if which == "random":
            Random(f"{seed} {item}").shuffle(found)
        else:
            found.sort(key=lambda p: p.loser_reward - p.winner_reward)
        kept += found[:per_task]
    return kept


class FitSession:
    """What `RewardLearner` asks of a session, without its actors and rollout engines: they hold most of the memory, and
    a fit needs neither."""

    def __init__(self, trainer: MARLHFTrainer) -> None:
        self.cluster, self.settings, self.plan = trainer.cluster, trainer._settings, trainer.plans.__getitem__
        self.cluster.arrange(trainer.layout, 1800, trainer.run_dir.path)
        self.cluster.join_groups(self.settings.device)

    def dropout_seed(self, role: str) -> int:
        return 0

    def start(self, builds: Mapping[str, Any]) -> None:
        self.cluster.create(dict(builds))


class Notes(dict):
    """The metrics of a fit: a reporter that only remembers."""

    log = dict.update

    def say(self, text: str) -> None:
        say(f"  {text}")


def fitted(
    options: argparse.Namespace, folder: Path, seed: int, fit: Sequence[PreferencePair], held_out: Sequence[PreferencePair],
    **settings: Any,
) -> dict[str, Any]:  # fmt: skip
    """Margins R_w − R_l on the held-out pairs after a fit, and the fit's own metrics; read back where they are there."""
    from comlrl_ds.trainers.preference.reward_learning import REWARD_ROLE, RewardLearner, read_reward_source

    # Everything that decides a fit of these pairs, so that a rerun never takes another's result.
    given = repr([[(p.item, p.tokens) for p in pairs] for pairs in (fit, held_out)])
    decides = settings | {"pairs": hashlib.sha256(given.encode()).hexdigest()}
    rate, epochs = settings["reward_learning_rate"], settings["reward_num_train_epochs"]
    file = folder / f"fit_{rate:g}_{epochs}.json"
    if file.exists() and (before := json.loads(file.read_text()))["settings"] == decides:
        return before
    started = time.perf_counter()
    # Held-out pairs are kept from the fit, so that it need not value them too.
    trainer = make_trainer(options, folder / "fit", seed, reward_eval_fraction=0, **settings)
    trainer.run_dir.path.mkdir(parents=True, exist_ok=True)
    source, notes = read_reward_source(trainer.args, trainer.setup, False), Notes()
    learner = RewardLearner(source, trainer.args, FitSession(trainer), notes, seed)  # type: ignore[arg-type]
    try:
        learner.start()
        learner.fit(fit, ROUND)
        sides = [p.winner_completions for p in held_out], [p.loser_completions for p in held_out]
        scores = learner.scores([p.prompts for p in held_out] * 2, [*sides[0], *sides[1]])
    finally:
        trainer.cluster.drop([REWARD_ROLE])
        gc.collect()  # an engine is full of cycles, and the next one needs its memory
    margins = [w - lo for w, lo in zip(scores, scores[len(held_out) :])]
    result = {"settings": decides, "margins": margins, "metrics": finite(notes), "seconds": time.perf_counter() - started}
    file.write_text(json.dumps(result))
    return result


# --- the measurement
def measured(options: argparse.Namespace, seed: int) -> list[dict[str, Any]]:
    """One seed: for each setting of the fit which held-out pairs the reward model and the baselines order right."""
    from comlrl_ds.trainers.preference.reward_learning import split_by_task

    # Named by all that decides the pairs, so that other options never find these.
    sizes = (options.tasks, options.candidates, "x".join(map(str, options.max_new_tokens)))
    folder = options.out / "_".join(map(str, (options.model.resolve().name, *sizes, f"seed{seed}")))
    pairs = pairs_of(options, folder / "pairs", seed)
    gc.collect()
    fit, held_out = split_by_task(pairs, options.eval_fraction, seed, ROUND)
    fit = some_of(fit, options.pairs_per_task, options.fit_pairs, seed)
    held_out = some_of(held_out, options.held_out_pairs_per_task, "random", seed)
    if not held_out:
        sys.exit(f"seed {seed}: of {len(pairs)} pairs none is held out; give more tasks, or a larger --eval-fraction")
    lengths = lengths_of(held_out)
    baselines = length_only(lengths_of(fit), lengths)
    longer = right((lengths["tokens"][0] - lengths["tokens"][1]).sum(1))
    marks = {"longer": longer, "shorter": 1 - longer}
    names = {}
    # The best on the very pairs that are reported, which flatters the baseline and never the reward model.
    for key, among in (("tokens", [n for n in baselines if n.startswith("tokens")]), ("lengths", list(baselines))):
        names[key] = max(among, key=lambda n: baselines[n].mean())
        marks[key] = baselines[names[key]]
    found = []
    for rate, epochs in itertools.product(options.learning_rate, options.epochs):
        settings = {"reward_learning_rate": rate, "reward_num_train_epochs": epochs}
        settings |= {"reward_train_batch_size": options.batch, "reward_max_length": options.max_length}
        say(f"seed {seed}: fit with learning rate {rate:g}, epochs {epochs}")
        result = fitted(options, folder, seed, fit, held_out, **settings)
        found.append(
            {
                "setting": (rate, epochs), "seed": seed, "fit_pairs": len(fit), "names": names,
                "items": np.array([p.item for p in held_out]), "seconds": result["seconds"],
                "fit_accuracy": result["metrics"]["reward/accuracy"],
                "marks": marks | {"reward": right(np.array(result["margins"]))}, "baselines": baselines,
            }
        )  # fmt: skip
    return found


def summary(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Accuracies, and differences to the baselines, of one seed or of several together; all with standard errors.

    Seeds share tasks, so a task is one cluster throughout.
    """
    items = np.concatenate([r["items"] for r in rows])
    marks = {name: np.concatenate([r["marks"][name] for r in rows]) for name in rows[0]["marks"]}
    marks |= {f"reward − {name}": marks["reward"] - marks[name] for name in ("tokens", "lengths")}
    accuracy = {name: dict(zip(("mean", "error"), clustered(values, items))) for name, values in marks.items()}
    (rate, epochs), seeds = rows[0]["setting"], [r["seed"] for r in rows]
    return {
        "learning_rate": rate, "epochs": epochs, "seeds": seeds, "fit_pairs": sum(r["fit_pairs"] for r in rows),
        "held_out_pairs": len(items), "held_out_tasks": len(np.unique(items)),
        "fit_accuracy": float(np.mean([r["fit_accuracy"] for r in rows])), "accuracy": accuracy,
        "baselines": {n: np.concatenate([r["baselines"][n] for r in rows]).mean() for n in rows[0]["baselines"]},
        "best_baselines": [r["names"] for r in rows], "fit_seconds": sum(r["seconds"] for r in rows),
    }  # fmt: skip


def finite(value: Any) -> Any:
    """The same with null for what JSON has no number for."""
    if isinstance(value, Mapping):
        return {k: finite(v) for k, v in value.items()}
    if isinstance(value, list):
        return [finite(v) for v in value]
    return None if isinstance(value, float) and not np.isfinite(value) else value


def say(text: str) -> None:
    print(text, flush=True)


def show(summaries: Sequence[Mapping[str, Any]]) -> None:
    """One line per seed and setting, and one of all seeds together."""
    from rich.console import Console
    from rich.table import Table

    table = Table(
        title="accuracy on held-out pairs in %, ± standard error by task; tokens, lengths: the best length-only models"
    )
    keys = ("reward", "tokens", "lengths", "longer", "shorter", "reward − tokens", "reward − lengths")
    for name in ("rate", "epochs", "seed", "pairs fit : held", "on fit", *keys):
        table.add_column(name, justify="right", no_wrap=name != "pairs fit : held")
    for s in summaries:
        numbers = [f"{100 * a['mean']:.1f} ± {100 * a['error']:.1f}" for a in (s["accuracy"][k] for k in keys)]
        seeds, pairs = ", ".join(map(str, s["seeds"])), f"{s['fit_pairs']} : {s['held_out_pairs']}"
        cells = (f"{s['learning_rate']:g}", str(s["epochs"]), seeds, pairs, f"{100 * s['fit_accuracy']:.1f}", *numbers)
        table.add_row(*cells, style="bold" if len(s["seeds"]) > 1 else None)
    Console(width=170, highlight=False).print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, required=True, help="of both agents, and backbone of the reward model")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--tasks", type=int, default=100, help="at most 164")
    parser.add_argument("--candidates", type=int, default=8, help="joint responses per task")
    parser.add_argument("--pairs-per-task", type=int, default=4, help="of the tasks that are fitted")
    parser.add_argument("--fit-pairs", choices=("reward_gap", "random"), default="reward_gap", help="which those are")
    parser.add_argument("--held-out-pairs-per-task", type=int, default=6, help="drawn at random; ties are no pairs")
    parser.add_argument("--max-new-tokens", type=int, nargs=AGENTS, default=[24, 48])
    parser.add_argument("--epochs", type=int, nargs="+", default=[1], help="several: a fit with each")
    parser.add_argument("--learning-rate", type=float, nargs="+", default=[2e-5], help="several: a fit with each")
    parser.add_argument("--batch", type=int, default=4, help="pairs per step of the fit")
    parser.add_argument(
        "--max-length", type=int, default=128, help="longest joint text; longer ones lose the starts of their prompts"
    )
    parser.add_argument("--eval-fraction", type=float, default=0.3, help="share of the tasks that are held out")
    parser.add_argument("--rollout", choices=("vllm", "transformers"), default="vllm")
    parser.add_argument("--out", type=Path, default=HERE / "build" / "reward_accuracy", help="pairs and fits are kept there")
    options = parser.parse_args()
    # Before torch is imported: threads that wait must not spin, since engines share the cores.
    calm = {"OMP_WAIT_POLICY": "PASSIVE", "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}
    for name, value in (calm | {"OMP_NUM_THREADS": str(os.cpu_count())}).items():
        os.environ.setdefault(name, value)
    started, rows = time.perf_counter(), [row for seed in options.seeds for row in measured(options, seed)]
    by_setting = [[r for r in rows if r["setting"] == s] for s in dict.fromkeys(r["setting"] for r in rows)]
    each = [[summary([r]) for r in group] for group in by_setting]
    together = [summary(group) for group in by_setting]
    show([s for group, whole in zip(each, together) for s in ([*group, whole] if len(group) > 1 else group)])
    used = {k: str(v) if isinstance(v, Path) else v for k, v in vars(options).items() if k != "out"}
    whole = {
        "seconds": time.perf_counter() - started,
        "options": used,
        "together": together,
        "by_seed": [s for group in each for s in group],
    }
    print(json.dumps(finite(whole), ensure_ascii=False, allow_nan=False))


if __name__ == "__main__":
    main()
