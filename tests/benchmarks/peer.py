"""One workload on the peer, CoMLRL. Started by run.py with the peer environment's interpreter."""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from tempfile import TemporaryDirectory
from typing import Any

import torch
import transformers
import workloads as shared
from comlrl.trainers.preference import (
    MADPOConfig,
    MADPOIterConfig,
    MADPOIterTrainer,
    MADPOTrainer,
    MARLHFIterConfig,
    MARLHFIterTrainer,
)


class Rounds(MADPOIterTrainer):
    """Says when a round ends, and counts the pairs that it trains on."""

    end_of_round: Callable[[], None]
    pairs = 0

    def _train_preference_pairs(self, pairs: Any, *args: Any, **keywords: Any) -> Any:
        self.pairs += len(pairs)
        return super()._train_preference_pairs(pairs, *args, **keywords)

    def _maybe_save_iteration_policy_checkpoint(self, iteration_idx: int) -> Any:
        """The last thing that a round does, saving or not."""
        saved = super()._maybe_save_iteration_policy_checkpoint(iteration_idx)
        self.end_of_round()
        return saved


class Titled(MARLHFIterTrainer):
    """Its reward model reads the shared title."""

    def _format_joint_text(self, prompts: Any, completions: Any) -> str:
        own = super()._format_joint_text(prompts, completions)
        return shared.TITLE + own[own.index("\n\n") :]


# Pairs from texts are a feature of the iterative trainers; their update and fit are the base trainers'.
TRAINERS = {
    "p1": (MADPOTrainer, MADPOConfig), "p2": (MADPOIterTrainer, MADPOIterConfig), "p3": (Titled, MARLHFIterConfig),
    "p4": (Titled, MARLHFIterConfig), "p5": (Rounds, MADPOIterConfig), "p5-history": (Rounds, MADPOIterConfig),
}  # fmt: skip


def own_settings(workload: str) -> dict[str, Any]:
    found = {"agent_devices": "cpu"}
    if workload in ("p3", "p4"):
        found |= {"reward_model_device": "cpu", "critic_devices": "cpu"}
    if workload == "p5-history":
        # It counts from the current policy, ours from the one before: so both compare with the same.
        found |= {"comparator_history_k": 2, "comparator_devices": "cpu"}
    return found


def counting(trainer: Any) -> list[int]:
    """[sampled tokens so far]. With a forced length no completion is padded, so every position is a sampled token."""
    total, generate = [0], trainer._generate_completions_with_external_prompts

    def counted(*args: Any, **keywords: Any) -> Any:
        found = generate(*args, **keywords)
        total[0] += sum(len(ids) for item in found["completion_input_ids"] for ids in item)
        return found

    trainer._generate_completions_with_external_prompts = counted
    return total


def fixed_pairs(trainer: Any, size: shared.Size) -> list[Any]:
    records = [
        {
            "prompts": p.prompts, "winner_completions": p.winners, "loser_completions": p.losers, "winner_reward": 1.0,
            "loser_reward": 0.0, "candidate_reward_mean": 0.5, "raw_rewards": [1.0, 0.0],
        }
        for p in shared.fixed_pairs(size, trainer.tokenizers[0])
    ]  # fmt: skip
    return [trainer._preference_pair_from_record(record) for record in records]


def collect(trainer: Any, size: shared.Size, passes: int, result: shared.Measurement) -> None:
    total = counting(trainer)
    for _ in range(passes):
        with result.one_pass():
            trainer._build_preference_dataset(min_new_tokens=size.collected)
    result.work = total[0] // passes


def update(trainer: Any, size: shared.Size, passes: int, result: shared.Measurement) -> None:
    pairs = fixed_pairs(trainer, size)
    agents = [agent for pair in pairs for agent in pair.agent_tensors]
    names = ("prompt_input_ids", "winner_completion_ids", "loser_completion_ids")
    result.work = shared.digest([getattr(agent, name).tolist() for agent in agents for name in names])
    for _ in range(passes):
        with result.one_pass():
            trainer._train_preference_pairs(pairs)


def fit(trainer: Any, size: shared.Size, passes: int, result: shared.Measurement) -> None:
    pairs = fixed_pairs(trainer, size)
    texts = [trainer._format_joint_reward_text(pair, use_winner=wins) for pair in pairs for wins in (True, False)]
    result.work = shared.digest(trainer.reward_tokenizer(texts)["input_ids"])
    for _ in range(passes):
        with result.one_pass():
            trainer._train_reward_model(pairs)


def step(trainer: Any, size: shared.Size, passes: int, result: shared.Measurement) -> None:
    total = counting(trainer)
    trainer.reward_model.eval()
    trainer._reward_model_active = True  # else the oracle scores
    for _ in range(passes):
        with result.one_pass():
            trainer._train_online_rl(min_new_tokens=size.step_tokens)
    result.work = total[0] // passes


def rounds(trainer: Rounds, size: shared.Size, passes: int, result: shared.Measurement) -> None:
    total = counting(trainer)
    with result.passes_of(passes) as trainer.end_of_round:
        trainer.train(min_new_tokens=size.round_tokens)
    result.disk_mb = shared.folder_mb(".")
    result.work = shared.work_of_rounds(total[0], trainer.pairs)


WORK = {"p1": collect, "p2": update, "p3": fit, "p4": step, "p5": rounds, "p5-history": rounds}


def main() -> None:
    arguments, size = shared.driver_arguments()
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    random.seed(0)
    torch.manual_seed(0)
    result = shared.Measurement()
    with TemporaryDirectory() as folder:
        os.chdir(folder)  # it writes into the working directory
        trainer_class, config_class = TRAINERS[arguments.workload]
        settings = shared.settings(arguments.workload, size, arguments.passes) | own_settings(arguments.workload)
        trainer = trainer_class(
            agent_model=arguments.model, args=config_class(**settings), train_dataset=shared.dataset(arguments.workload, size),
            model_config=None if arguments.dtype == "default" else {"torch_dtype": arguments.dtype}, **shared.TEAM,
        )  # fmt: skip
        if arguments.workload in ("p3", "p4"):
            trainer._init_reward_model()
        result.started()
        result.dtype = str(next(trainer.agents[0].parameters()).dtype).removeprefix("torch.")
        trainer.verbose = False
        for agent in trainer.agents:
            agent.train()
        WORK[arguments.workload](trainer, size, arguments.passes, result)
        result.trainer_peak_mb = result.peak_mb = shared.own_peak_mb()
    result.say()


if __name__ == "__main__":
    main()
