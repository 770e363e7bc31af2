"""What a run file says of its task, checked as far as that needs neither torch nor a tokenizer."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from comlrl_ds.config.errors import ConfigError, Findings, Problem
from comlrl_ds.config.iterative import MADPOIterConfig
from comlrl_ds.config.model_files import check_vocabulary, vocabulary_of
from comlrl_ds.config.references import beside, is_path
from comlrl_ds.config.run_file import RunFile
from comlrl_ds.config.task import LoadedTask, check_tasks, load_task
from comlrl_ds.planning.role_models import agent_models
from comlrl_ds.preference.oracle import Oracle
from comlrl_ds.preference.prompts import PromptError, check_formatters, formatted
from comlrl_ds.rollout.start import length_limit, vllm_is_installed


def check_task(run_file: RunFile, base: Path) -> dict[str, str]:
    """Dataset, formatters, oracle, model folders, token limits.

    Returns:
        what to show of them, by name.

    Raises:
        ConfigError: with every problem.
    """
    found, args = Findings(), run_file.trainer_config
    team = args.num_agents
    task = found.of(partial(load_task, run_file.task, base))
    if run_file.rollout.backend == "vllm" and not vllm_is_installed():
        found.add("rollout.backend", "vLLM is not installed; install comlrl-ds[cpu] or comlrl-ds[gpu], or write transformers")
    sources = [source for source, _ in agent_models(run_file, base)]
    folders = [Path(source).expanduser() for source in sources]
    for i, (folder, source, agent) in enumerate(zip(folders, sources, run_file.agents)):
        named = agent.model if source == beside(agent.model, base) else source  # the base of a PEFT folder
        found.of(partial(_check_folder, folder, named, f"agents.{i}.model"))
    limits = args.token_limits
    for i, (folder, new) in enumerate(zip(folders, limits)):
        is_model = (folder / "config.json").is_file()
        if is_model and (message := length_limit(run_file.rollout, str(folder)).no_room(new, f"agent {i}")):
            found.add("args.max_new_tokens", message)
    if isinstance(args, MADPOIterConfig):
        _check_comparator(args, base, found)
    if task is not None:
        formatters = found.under("task", partial(check_formatters, task.formatters, team))
        found.under("task", partial(Oracle, task.reward_func, team, task.reward_processor))
        for name, dataset in (("task.dataset", task.train), ("task.eval_dataset", task.held_out)):
            if dataset is not None and formatters:
                every = folders if len(folders) == team else folders * team  # one actor writes every role
                found.of(partial(_check_first_task, dataset, name, formatters, every))
    found.raise_any()
    assert task
    return _shown(run_file, task)


def _check_comparator(args: MADPOIterConfig, base: Path, found: Findings) -> None:
    if args.comparator_policy == "api":
        found.under("args", args.api.check_credential)
    if args.comparator_policy == "model":
        name = "comparator_agents" if args.comparator_agents is not None else "comparator_model_name"
        listed = args.comparator_agents if args.comparator_agents is not None else [args.comparator_model_name]
        for model in listed:
            found.of(partial(_check_folder, Path(beside(str(model), base)).expanduser(), str(model), f"args.{name}"))


def _shown(run_file: RunFile, task: LoadedTask) -> dict[str, str]:
    args = run_file.trainer_config
    held = 0 if task.held_out is None else min(args.eval_num_samples, len(task.held_out))
    agents = {
        f"agent {i}": f"{agent.model}, up to {new} new tokens"
        for i, (agent, new) in enumerate(zip(run_file.agents, args.token_limits))
    }
    return {
        "trainer": run_file.trainer,
        **agents,
        "tasks": f"{len(task.train)} × {args.preference_num_candidates} candidates; {held} held out",
        "step": f"{args.batch_size} pairs, forwards of up to {args.max_tokens_per_micro_batch} tokens",
        "epochs": str(args.num_train_epochs),
        **(_rounds(args) if isinstance(args, MADPOIterConfig) else {}),
        "run": f"{run_file.run.dir}, seed {run_file.run.seed}",
    }


def _rounds(args: MADPOIterConfig) -> dict[str, str]:
    source = {
        "model": args.comparator_model_name or "comparator_agents",
        "history": f"{args.history_k} round{'s' * (args.history_k > 1)} before",
    }
    source |= {"api": f"{args.api.format} at {args.api.place}"} if args.comparator_policy == "api" else {}
    detail = source.get(args.comparator_policy)
    mode = ", one writes every role" if args.compares_centralized else ""
    return {
        "rounds": str(args.num_iterations),
        "comparator": f"{args.comparator_policy}{f' ({detail})' if detail else ''}{mode},"
        f" {args.comparator_candidates} candidates",
        "replay": args.replay.mode,
    }


def _check_folder(folder: Path, named: str, path: str) -> None:
    if not folder.is_dir():
        if is_path(named):
            raise ConfigError(Problem(path, f"no folder {named!r}"))
        return  # a repository: whether it is there takes a network to know
    if not (folder / "config.json").is_file():
        raise ConfigError(Problem(path, f"{named!r} has no config.json; give a folder in Hugging Face layout"))
    check_vocabulary(str(folder), vocabulary_of(folder), path)


def _check_first_task(dataset: Sequence[Any], name: str, formatters: Sequence[Any], folders: Sequence[Path]) -> None:
    check_tasks(dataset, name)
    for agent, (formatter, folder) in enumerate(zip(formatters, folders)):
        try:
            prompt = formatted(formatter, dataset[0], f"task 0, agent {agent}")
        except PromptError as error:
            raise ConfigError(Problem(name, str(error))) from None
        if not isinstance(prompt, str) and _lacks_template(folder):
            message = f"task 0, agent {agent}: the formatter returned chat messages, but the tokenizer has no chat template"
            raise ConfigError(Problem(name, f"{message}; return a string"))


def _lacks_template(folder: Path) -> bool:
    """Whether a folder's tokenizer surely has no chat template."""
    file = folder / "tokenizer_config.json"
    if not file.is_file() or any(folder.glob("chat_template*")):
        return False
    return not json.loads(file.read_text()).get("chat_template")
