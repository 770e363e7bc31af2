"""Critics of a trainer: one for the whole team (maac), or one per agent (iac)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from comlrl_ds.cluster import call
from comlrl_ds.config.errors import ConfigError, Problem
from comlrl_ds.config.marlhf import MARLHFConfig
from comlrl_ds.config.task import as_list
from comlrl_ds.engines.engine import PolicyEngine
from comlrl_ds.engines.scalar import ScalarEngine
from comlrl_ds.learners.scalar import ScalarLearner, ScalarStep, ValueFit
from comlrl_ds.maths.seeds import seed_of
from comlrl_ds.preference.collection import SampledItem
from comlrl_ds.preference.joint_text import JointText, critic_text, prompts_text
from comlrl_ds.rollout.start import model_limits
from comlrl_ds.trainers.preference.handed_models import ModelCopies, folders_of
from comlrl_ds.trainers.preference.reward_learning import longest_text
from comlrl_ds.trainers.preference.session import Session
from comlrl_ds.trainers.preference.team import TeamSetup


@dataclass
class CriticSources:
    """Critics that have been checked; they hold no weights. `text` makes a central critic's token ids."""

    folders: list[str]
    text: JointText


def read_critic_sources(
    args: MARLHFConfig, setup: TeamSetup, critic_model: Any, critics: Sequence[Any] | None, copies: ModelCopies, is_object: bool
) -> CriticSources | None:
    """Where critics start from: `critics`, one each; else `critic_model`, `critic_model_name`, the actors' own models.

    Args:
        copies: of model objects. is_object: whether the actors are model objects, which have no source.

    Raises:
        ConfigError: with every problem.
    """
    roles = args.critic_roles
    if not roles:
        if critics is not None or critic_model is not None:
            path = "critics" if critics is not None else "critic_model"
            why = "use_separate_critic is off" if args.value_heads else f"{args.rl_algorithm} has no critic"
            raise ConfigError(Problem(path, f"given, but {why}; leave it out, or write rl_algorithm maac or iac"))
        return None
    critics = None if critics is None else as_list(critics, "critics", "critic")
    if critics is not None and len(critics) != len(roles):
        raise ConfigError(Problem("critics", f"{len(critics)} for {len(roles)} critics of {args.rl_algorithm}"))
    name = critic_model if critic_model is not None else args.critic_model_name
    listed = list(critics) if critics is not None else [name] * len(roles)
    if listed[0] is None and is_object:
        raise ConfigError(Problem("critic_model_name", "required when actors are model objects: the critics' backbone"))
    listed = [setup.sources[min(i, len(setup.sources) - 1)] if c is None else c for i, c in enumerate(listed)]
    path = "critics" if critics is not None else "critic_model_name"
    folders = folders_of(listed, [path] * len(roles), list(map(folder_name, roles)), copies)
    if args.rl_algorithm == "iac":
        _check_room(args, setup, folders, path)
    tokenizer = _tokenizer(folders[0], setup)
    form = critic_text if args.critic_type == "q" else prompts_text
    return CriticSources(folders, JointText(tokenizer, longest_text(tokenizer, folders[0]), form))


def _check_room(args: MARLHFConfig, setup: TeamSetup, folders: Sequence[str], path: str) -> None:
    """What an agent's own critic reads is never cut, as the agent's own prompts are not."""
    for i, folder in enumerate(folders):
        longest = setup.prompt_limits[i] + (args.token_limits[i] if args.critic_type == "q" else 0)
        if (room := model_limits(folder)[0]) < longest:
            message = f"{folder!r} takes {room} tokens, and agent {i} may give it {longest} (rollout.max_model_len)"
            raise ConfigError(Problem(path, message))


def _tokenizer(folder: str, setup: TeamSetup) -> Any:
    from comlrl_ds.engines.loading import load_tokenizer

    return setup.team.tokenizers[0] if folder == setup.sources[0] else load_tokenizer(folder, "critic_model_name")


def folder_name(role: str) -> str:
    """Of a critic's folder among a trainer's saved models."""
    return role.replace(".", "_")


def own_row(sampled: SampledItem, agent: int, g: int, critic_type: str) -> tuple[int, ...]:
    """What an agent's own critic reads of a response: the agent's prompt (v), or its completion after it (q)."""
    prompt = tuple(sampled.joint.prompts[agent].ids)
    return prompt + tuple(sampled.completions[agent][g].ids) if critic_type == "q" else prompt


class ValueHeads:
    """Values of sampled responses by heads on the actors, which learn them in the actors' own steps."""

    def __init__(self, args: MARLHFConfig, session: Session) -> None:
        self._args, self._session = args, session

    def values(self, sampled: Sequence[SampledItem]) -> Tensor:
        """[agents, tasks, G]; a v-head values each task once."""
        G, kind = self._args.num_generations, self._args.critic_type
        found = []
        for agent, role in enumerate(self._session.actors):
            rows = [own_row(s, agent, g, kind) for s in sampled for g in (range(G) if kind == "q" else range(1))]
            learner = ScalarLearner(self._session.cluster, role, self._args.max_tokens_per_micro_batch, PolicyEngine)
            found.append(torch.tensor(learner.values(rows), dtype=torch.float64).view(len(sampled), -1).expand(-1, G))
        return torch.stack(found)


class Critics:
    """Values of sampled responses, and the critics' steps.

    `critic_type` v values what is asked, q also what was answered. The central critic reads one text with every agent's
    prompt (and response); an agent's own critic reads the agent's token ids, and its value is that of the last one.
    """

    def __init__(self, sources: CriticSources, args: MARLHFConfig, session: Session, seed: int) -> None:
        self._sources, self._args, self._session, self._seed = sources, args, session, seed
        self.roles = args.critic_roles

    def start(self, total_steps: int) -> None:
        """Loads them, unless they are: they learn over all rounds.

        Args:
            total_steps: of their learning-rate schedule, where the DeepSpeed file has one.
        """
        from comlrl_ds.engines.build import build_scalar

        args, session = self._args, self._session
        builds = {
            role: call(
                build_scalar, folder, session.plan(role), dropout=not args.disable_dropout,
                attn_implementation=session.settings.attn_implementation, checkpointing=args.gradient_checkpointing,
                head_seed=seed_of(self._seed, "critic_head", k), hidden_dim=args.critic_value_head_hidden_dim,
                lora=args.critic_lora, dropout_seed=session.dropout_seed(role), current=session.kept_of(folder_name(role)),
            )
            for k, (role, folder) in enumerate(zip(self.roles, self._sources.folders))
            if role not in session.others
        }  # fmt: skip
        if builds:
            session.start(builds)
            session.cluster.run({role: call(ScalarEngine.start_schedule, total_steps) for role in builds})

    def values(self, sampled: Sequence[SampledItem]) -> Tensor:
        """[critics, tasks, G]; a v-critic values each task once."""
        G, q = self._args.num_generations, self._args.critic_type == "q"
        found = []
        for k, role in enumerate(self.roles):
            rows = [self._row(k, s, g) for s in sampled for g in (range(G) if q else range(1))]
            values = torch.tensor(self._fit(role).values(rows), dtype=torch.float64).view(len(sampled), -1)
            found.append(values.expand(-1, G))
        return torch.stack(found)

    def step(self, chosen: Sequence[tuple[SampledItem, int]], targets: Tensor) -> list[ScalarStep]:
        """One step of every critic on samples, with loss `value_loss_coef` · mean (target − V)².

        Args:
            chosen: (task, response). targets: [agents, samples], ρ_i; the central critic learns their mean over agents.
        """
        wanted = targets.mean(0, keepdim=True) if len(self.roles) == 1 else targets
        return [
            self._fit(role).step([self._row(k, s, g) for s, g in chosen], wanted[k].tolist(), self._args.value_loss_coef)
            for k, role in enumerate(self.roles)
        ]

    def save(self, folder: Path) -> None:
        """Writes critic or critic_0 … with their tokenizers."""
        session = self._session
        targets = {role: folder / folder_name(role) for role in self.roles if role in session.others}
        session.cluster.run({role: call(ScalarEngine.save_pretrained, target) for role, target in targets.items()})
        for target in targets.values():
            self._sources.text.tokenizer.save_pretrained(target)

    def _fit(self, role: str) -> ValueFit:
        return ValueFit(self._session.cluster, role, self._args.max_tokens_per_micro_batch)

    def _row(self, critic: int, sampled: SampledItem, g: int) -> tuple[int, ...]:
        if self._args.rl_algorithm == "iac":
            return own_row(sampled, critic, g, self._args.critic_type)
        return self._sources.text.ids([p.text for p in sampled.joint.prompts], [row[g] for row in sampled.written])

    @property
    def cut_texts(self) -> int:
        """Texts of the central critic that were too long for it, each time that they were read."""
        return self._sources.text.cut
