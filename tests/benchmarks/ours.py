"""One workload on comlrl-ds, in this process and its engine children. Started by run.py."""

from __future__ import annotations

import argparse
from tempfile import TemporaryDirectory

import workloads as shared

from comlrl_ds.maths.packing import PairTokens
from comlrl_ds.preference.records import PreferencePair
from comlrl_ds.rollout.base import Sampling
from comlrl_ds.trainers.preference import MADPOConfig, MADPOTrainer


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


def make_trainer(arguments: argparse.Namespace, size: shared.Size, folder: str) -> MADPOTrainer:
    return MADPOTrainer(
        agent_model=arguments.model, args=MADPOConfig(**shared.settings(arguments.workload, size)),
        train_dataset=shared.tasks(size.tasks), run_dir=f"{folder}/run", verbose=False,
        model_config=None if arguments.dtype == "default" else {"dtype": arguments.dtype}, **shared.TEAM,
    )  # fmt: skip


def main() -> None:
    arguments, size = shared.driver_arguments()
    result = shared.Measurement()
    with TemporaryDirectory() as folder, make_trainer(arguments, size, folder) as trainer:
        session = trainer.session
        _ = session.actors
        session.pool()
        result.started()
        result.dtype = trainer.plans["actor.0"].dtype

        def engines_cpu_s() -> float:
            return sum(engine["cpu_s"] for engine in session.usage())

        if arguments.workload == "p1":
            sampling = Sampling(**shared.SAMPLING, min_new_tokens=size.collected)
            for k in range(arguments.passes):
                with result.one_pass(engines_cpu_s):
                    collected = trainer.collect_preferences(sampling, round=k + 1)
            result.work = sum(len(c.ids) for item in collected.sampled for row in item.completions for c in row)
        else:
            tokenizers = trainer.setup.team.tokenizers
            pairs = [tokenised(k, pair, tokenizers) for k, pair in enumerate(shared.fixed_pairs(size, tokenizers[0]))]
            for _ in range(arguments.passes):
                with result.one_pass(engines_cpu_s):
                    trainer.train_on_pairs(pairs)
            result.work = shared.digest([ids for p in pairs for t in p.tokens for ids in (t.prompt, t.winner, t.loser)])
        result.trainer_peak_mb = shared.own_peak_mb()
        result.peak_mb = result.trainer_peak_mb + sum(engine["peak_rss_mb"] for engine in session.usage())
    result.say()


if __name__ == "__main__":
    main()
