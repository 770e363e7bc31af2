"""One workload on the peer, CoMLRL. Started by run.py with the peer environment's interpreter."""

from __future__ import annotations

import os
import random
from tempfile import TemporaryDirectory
from typing import Any

import torch
import transformers
import workloads as shared
from comlrl.trainers.preference import MADPOConfig, MADPOIterConfig, MADPOIterTrainer, MADPOTrainer


def counting(trainer: Any) -> list[int]:
    """[sampled tokens so far]. With a forced length no completion is padded, so every position is a sampled token."""
    total, generate = [0], trainer._generate_completions_with_external_prompts

    def counted(*args: Any, **keywords: Any) -> Any:
        found = generate(*args, **keywords)
        total[0] += sum(len(ids) for item in found["completion_input_ids"] for ids in item)
        return found

    trainer._generate_completions_with_external_prompts = counted
    return total


def main() -> None:
    arguments, size = shared.driver_arguments()
    collects = arguments.workload == "p1"
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    random.seed(0)
    torch.manual_seed(0)
    result = shared.Measurement()
    with TemporaryDirectory() as folder:
        os.chdir(folder)  # it writes into the working directory
        # Pairs from texts are a feature of the iterative trainer; its update is the base trainer's.
        trainer_class, config_class = (MADPOTrainer, MADPOConfig) if collects else (MADPOIterTrainer, MADPOIterConfig)
        args = config_class(**shared.settings(arguments.workload, size), agent_devices="cpu")
        trainer = trainer_class(
            agent_model=arguments.model, args=args, train_dataset=shared.tasks(size.tasks),
            model_config=None if arguments.dtype == "default" else {"torch_dtype": arguments.dtype}, **shared.TEAM,
        )  # fmt: skip
        result.started()
        result.dtype = str(next(trainer.agents[0].parameters()).dtype).removeprefix("torch.")
        trainer.verbose = False
        for agent in trainer.agents:
            agent.train()
        if collects:
            total = counting(trainer)
            for _ in range(arguments.passes):
                with result.one_pass():
                    trainer._build_preference_dataset(min_new_tokens=size.collected)
            result.work = total[0] // arguments.passes
        else:
            records = [
                {
                    "prompts": p.prompts, "winner_completions": p.winners, "loser_completions": p.losers, "winner_reward": 1.0,
                    "loser_reward": 0.0, "candidate_reward_mean": 0.5, "raw_rewards": [1.0, 0.0],
                }
                for p in shared.fixed_pairs(size, trainer.tokenizers[0])
            ]  # fmt: skip
            pairs = [trainer._preference_pair_from_record(record) for record in records]
            agents = [agent for pair in pairs for agent in pair.agent_tensors]
            names = ("prompt_input_ids", "winner_completion_ids", "loser_completion_ids")
            result.work = shared.digest([getattr(agent, name).tolist() for agent in agents for name in names])
            for _ in range(arguments.passes):
                with result.one_pass():
                    trainer._train_preference_pairs(pairs)
        result.trainer_peak_mb = result.peak_mb = shared.own_peak_mb()
    result.say()


if __name__ == "__main__":
    main()
