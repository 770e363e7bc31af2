"""One workload on comlrl-ds, in this process and its engine children. Started by run.py."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from tempfile import TemporaryDirectory
from typing import Any

import workloads as shared

from comlrl_ds.maths.packing import PairTokens
from comlrl_ds.preference import joint_text
from comlrl_ds.preference.records import PreferencePair
from comlrl_ds.rollout.base import Sampling
from comlrl_ds.trainers.preference import (
    MADPOConfig,
    MADPOIterConfig,
    MADPOIterTrainer,
    MADPOTrainer,
    MARLHFIterConfig,
    MARLHFIterTrainer,
)
from comlrl_ds.trainers.preference.saving import Progress

CPUSeconds = Callable[[], float]


class Rounds(MADPOIterTrainer):
    """Says when a round ends, and counts the pairs that it trains on."""

    end_of_round: Callable[[], None]
    pairs = 0

    def train_on_pairs(self, pairs: Sequence[PreferencePair], progress: Progress | None = None) -> None:
        self.pairs += len(pairs)
        super().train_on_pairs(pairs, progress)

    def _end_round(self, progress: Progress) -> None:
        super()._end_round(progress)
        self.end_of_round()

    def _finish(self, pairs: Sequence[PreferencePair]) -> None:
        """The peer leaves the final agents to its user, so they are no part of the rounds."""


TRAINERS = {
    "p1": (MADPOTrainer, MADPOConfig), "p2": (MADPOTrainer, MADPOConfig), "p3": (MARLHFIterTrainer, MARLHFIterConfig),
    "p4": (MARLHFIterTrainer, MARLHFIterConfig), "p5": (Rounds, MADPOIterConfig), "p5-history": (Rounds, MADPOIterConfig),
}  # fmt: skip


def make_trainer(arguments: argparse.Namespace, size: shared.Size, folder: str) -> Any:
    trainer_class, config_class = TRAINERS[arguments.workload]
    settings = shared.settings(arguments.workload, size, arguments.passes)
    if arguments.workload == "p3":
        settings["reward_eval_fraction"] = 0.0  # the peer fits all pairs
    return trainer_class(
        agent_model=arguments.model, args=config_class(**settings), train_dataset=shared.dataset(arguments.workload, size),
        run_dir=f"{folder}/run", verbose=False, checkpoint_interval=0,  # the peer writes none unless it is told to
        model_config=None if arguments.dtype == "default" else {"dtype": arguments.dtype}, **shared.TEAM,
    )  # fmt: skip


def tokenised(index: int, pair: shared.FixedPair, tokenizers: list) -> PreferencePair:
    """What collection would have made of these texts."""
    sides = zip(tokenizers, pair.prompts, pair.winners, pair.losers)
    tokens = tuple(
        PairTokens(
            tokenizer(prompt)["input_ids"],
            tokenizer(winner, add_special_tokens=False)["input_ids"],
            tokenizer(loser, add_special_tokens=False)["input_ids"],
        )
        for tokenizer, prompt, winner, loser in sides
    )
    return PreferencePair(
        pair.prompts, pair.winners, pair.losers, 1.0, 0.0, 0.5, [1.0, 0.0], None, None, tokens, index, winner=0, loser=1
    )  # fmt: skip


def fixed_pairs(trainer: Any, size: shared.Size) -> list[PreferencePair]:
    tokenizers = trainer.setup.team.tokenizers
    return [tokenised(k, pair, tokenizers) for k, pair in enumerate(shared.fixed_pairs(size, tokenizers[0]))]


def collect(trainer: Any, size: shared.Size, passes: int, result: shared.Measurement, engines_cpu_s: CPUSeconds) -> None:
    sampling = Sampling(**shared.SAMPLING, min_new_tokens=size.collected)
    for k in range(passes):
        with result.one_pass(engines_cpu_s):
            collected = trainer.collect_preferences(sampling, round=k + 1)
    result.work = sum(len(c.ids) for item in collected.sampled for row in item.completions for c in row)


def update(trainer: Any, size: shared.Size, passes: int, result: shared.Measurement, engines_cpu_s: CPUSeconds) -> None:
    pairs = fixed_pairs(trainer, size)
    for _ in range(passes):
        with result.one_pass(engines_cpu_s):
            trainer.train_on_pairs(pairs)
    result.work = shared.digest([ids for p in pairs for t in p.tokens for ids in (t.prompt, t.winner, t.loser)])


def fit(trainer: Any, size: shared.Size, passes: int, result: shared.Measurement, engines_cpu_s: CPUSeconds) -> None:
    pairs, rewards = fixed_pairs(trainer, size), trainer._rewards()
    for k in range(passes):
        with result.one_pass(engines_cpu_s):
            rewards.fit(pairs, k + 1)
    result.work = shared.digest([ids for pair in pairs for ids in rewards._rows(pair)])


def step(trainer: Any, size: shared.Size, passes: int, result: shared.Measurement, engines_cpu_s: CPUSeconds) -> None:
    trainer._train_sampling = Sampling(**shared.SAMPLING, min_new_tokens=size.step_tokens)
    for k in range(passes):
        with result.one_pass(engines_cpu_s):
            trainer.train_on_pairs([], Progress(round=k + 1, fitted=True))  # a round of its own: it samples anew
    result.work = trainer.session.pool().generated_tokens // passes


def rounds(trainer: Rounds, size: shared.Size, passes: int, result: shared.Measurement, engines_cpu_s: CPUSeconds) -> None:
    with result.passes_of(passes, engines_cpu_s) as trainer.end_of_round:
        trainer.train(min_new_tokens=size.round_tokens)
    result.disk_mb = shared.folder_mb(trainer.run_dir.path)
    result.work = shared.work_of_rounds(trainer.session.pool().generated_tokens, trainer.pairs)


WORK = {"p1": collect, "p2": update, "p3": fit, "p4": step, "p5": rounds, "p5-history": rounds}


def main() -> None:
    arguments, size = shared.driver_arguments()
    joint_text.TITLE = shared.TITLE
    result = shared.Measurement()
    with TemporaryDirectory() as folder, make_trainer(arguments, size, folder) as trainer:
        session = trainer.session
        _ = session.actors
        session.pool()
        if arguments.workload in ("p3", "p4"):
            trainer._rewards().start()
        result.started()
        result.dtype = trainer.plans["actor.0"].dtype

        def engines_cpu_s() -> float:
            return sum(engine["cpu_s"] for engine in session.usage())

        WORK[arguments.workload](trainer, size, arguments.passes, result, engines_cpu_s)
        result.trainer_peak_mb = shared.own_peak_mb()
        result.peak_mb = result.trainer_peak_mb + sum(engine["peak_rss_mb"] for engine in session.usage())
    result.say()


if __name__ == "__main__":
    main()
