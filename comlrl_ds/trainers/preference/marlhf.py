"""Multi-agent RLHF: a joint reward model fitted to the pairs, then policy learning on its scores."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from comlrl_ds.cluster import call
from comlrl_ds.config.errors import Findings
from comlrl_ds.config.lora_layers import check_lora
from comlrl_ds.config.marlhf import MARLHFConfig, MARLHFIterConfig
from comlrl_ds.engines.heads import ValueHead
from comlrl_ds.engines.scalar import ScalarEngine
from comlrl_ds.learners.madpo import NonFiniteError
from comlrl_ds.learners.policy_gradient import PolicyGradientLearner, Samples, ValueTargets
from comlrl_ds.maths.advantages import advantages, normalized
from comlrl_ds.maths.seeds import generator_of, seed_of
from comlrl_ds.preference.collection import SampledItem, Side
from comlrl_ds.preference.journal import Journal, Known, read_journal
from comlrl_ds.preference.oracle import MISSING, Score
from comlrl_ds.preference.prompts import JointPrompt
from comlrl_ds.preference.records import PreferencePair
from comlrl_ds.trainers.preference.conducted import conducted
from comlrl_ds.trainers.preference.critics import Critics, ValueHeads, read_critic_sources
from comlrl_ds.trainers.preference.madpo import MADPOTrainer
from comlrl_ds.trainers.preference.madpo_iter import MADPOIterTrainer
from comlrl_ds.trainers.preference.references import References, reference_role
from comlrl_ds.trainers.preference.reward_learning import REWARD_ROLE, RewardLearner, read_reward_source
from comlrl_ds.trainers.preference.saving import Progress
from comlrl_ds.trainers.preference.session import Rates
from comlrl_ds.trainers.preference.team import TeamSetup

if TYPE_CHECKING:
    Base = MADPOTrainer
else:
    Base = object


class RewardAndPolicyLearning(Base):
    """What MARLHF does with a round's pairs, in place of MADPO's updates."""

    args: MARLHFConfig

    def __init__(
        self, *arguments: Any, metrics_callback: Callable[..., Any] | None = None, critic_model: Any = None,
        critics: Sequence[Any] | None = None, **keywords: Any,
    ) -> None:  # fmt: skip
        self._critic_model, self._critic_list, self._metrics_callback = critic_model, critics, metrics_callback
        self._total_updates = 0
        super().__init__(*arguments, **keywords)

    # --- set-up
    def _other_roles(self) -> Rates:
        args = self.args
        roles = {REWARD_ROLE: (args.reward_train_batch_size, args.reward_learning_rate)}
        roles |= dict.fromkeys(args.critic_roles, (args.batch_size, args.critic_rate))
        if args.reference_kl_enabled:
            full = [i for i, own in enumerate(self.lora) if own is None]
            roles |= {reference_role(i): (1, args.agent_learning_rate) for i in full}
        return roles

    def _check_more(self, setup: TeamSetup) -> None:
        super()._check_more(setup)
        args = self.args
        is_object = self._copies.holds(setup.sources[0])
        self._reward_source = read_reward_source(args, setup, is_object)
        self._critic_sources = read_critic_sources(args, setup, self._critic_model, self._critic_list, self._copies, is_object)
        scalars = [(self._reward_source.folder, args.reward_lora, "args.reward_lora")]
        critics = dict.fromkeys(self._critic_sources.folders if self._critic_sources else [])
        scalars += [(folder, args.critic_lora, "args.critic_lora") for folder in critics]
        found = Findings()
        for folder, own, path in scalars:
            found.of(partial(check_lora, folder, Path(folder), own, path, backbone=True))
        found.raise_any()

    def _value_heads(self) -> list[ValueHead]:
        if not self.args.value_heads:
            return []
        width = self.args.value_head_hidden_dim
        return [ValueHead(seed_of(self.seed, "value_head", i), width) for i in range(self.args.num_actors)]

    def _start_others(self, roles: list[str]) -> None:
        if REWARD_ROLE in roles:
            rewards = self._rewards()
            rewards.start()
            rewards.start_schedule(1)  # it has been fitted; the checkpoint says how far
        if set(roles) & set(self.args.critic_roles):
            self._critics()

    def _start_schedules(self, total: int) -> None:
        self._total_updates = total
        super()._start_schedules(total)
        critics = [role for role in self.args.critic_roles if role in self.session.others]
        self.cluster.run({role: call(ScalarEngine.start_schedule, total) for role in critics})

    def _teaches(self, pair: PreferencePair) -> bool:
        """A reward model reads texts, of which at least one has to differ."""
        return pair.winner_completions != pair.loser_completions

    def _rewards(self) -> RewardLearner:
        return RewardLearner(self._reward_source, self.args, self.session, self.reporter, self.seed)

    # --- a round
    @conducted
    def train_on_pairs(self, pairs: Sequence[PreferencePair], progress: Progress | None = None) -> None:
        """Fits a new reward model to the pairs, then `num_train_epochs` passes of policy learning over the tasks."""
        progress = progress or Progress()
        prompts = self.setup.prompt_builder().build_some(self.train_dataset)
        args = self.args
        # Buffers count tasks, or with a critic responses, and hold whole tasks either way.
        size = args.rollout_buffer_size if args.reinforce else math.ceil(args.rollout_buffer_size / args.num_generations)
        buffers = math.ceil(len(prompts) / size)
        per_buffer = math.ceil(size * (1 if args.reinforce else args.num_generations) / args.batch_size)
        rounds = self._last_round(progress) - progress.round + 1
        self._expect_updates(progress, rounds * args.num_train_epochs * buffers * per_buffer)
        rewards = self._rewards()
        if not progress.fitted:
            self.session.to_training()
            rewards.start()
            self.policy_state.changed()
            rewards.fit(pairs, progress.round)
            progress.fitted = True
            self._save_now(progress)
        elif REWARD_ROLE not in self.session.others:  # it was fitted before the trainer was closed
            rewards.start(self.session.kept_of(REWARD_ROLE))
        self.session.rest(REWARD_ROLE)
        known = read_journal(self.run_dir.journal(progress.round))
        with (
            Journal(self.run_dir.journal(progress.round)) as journal,
            self.display.bar("policy learning", args.num_train_epochs * buffers) as bar,
        ):
            while progress.epoch < args.num_train_epochs:
                while progress.batches < buffers:
                    first = progress.batches * size
                    if self._evaluates and any(k % args.eval_interval == 0 for k in range(first, first + size)):
                        self._evaluate_once(f"at update {self.reporter.updates}" if self.reporter.updates else "before")
                    reward = self._learn_from(prompts[first : first + size], progress, rewards, journal, known)
                    bar.advance(1, f"learned reward {reward:.3f}")
                    progress.batches += 1
                    if progress.batches < buffers:
                        self._save_if_due(progress, end_of_epoch=False)
                progress.epoch, progress.batches = progress.epoch + 1, 0
                if progress.epoch < args.num_train_epochs:
                    self._save_if_due(progress, end_of_epoch=True)

    def _learn_from(
        self, prompts: Sequence[JointPrompt], progress: Progress, rewards: RewardLearner, journal: Journal, known: Known
    ) -> float:
        """One rollout buffer: sample, score, compare, step. Returns the mean learned reward."""
        args, team, count = self.args, self.setup.team, self.args.num_generations
        side = Side(team, self.session.policies(), prompts, count, f"policy.{progress.epoch}")
        sampling = replace(self._train_sampling, logprobs=True)
        sampled = self._sampler().sample_sides(
            [side], sampling, round=progress.round, journal=journal, known=known, scored=False
        )[0]
        self.reporter.syncs(self.session.syncs)
        self.session.to_training()
        each = [(s, g) for s in sampled for g in range(count)]
        flat = rewards.scores([_prompts(s) for s, _ in each], [[row[g] for row in s.written] for s, g in each])
        learned = torch.tensor(flat, dtype=torch.float64).view(len(sampled), count)
        kl = References(self.setup.sources, args, self.session).kl(sampled) if args.reference_kl_enabled else None
        # ρ_i = r − β · KL_i, for each agent its own.
        signals = learned.expand(args.num_actors, -1, -1) if kl is None else learned - args.reference_kl_coef * kl
        if args.reinforce:
            gained = self._beyond_the_baseline(signals)
        else:
            valued = ValueHeads(args, self.session) if args.value_heads else self._critics()
            values = valued.values(sampled)
            gained = signals - values
            gained = torch.stack([normalized(a, "all") for a in gained]) if args.normalizes else gained
        self._call_back(sampled, learned)
        self.reporter.buffer(learned, list(gained), None if kl is None else (list(kl), args.reference_kl_coef))
        generator = generator_of(self.seed, "policy_order", progress.round, progress.epoch, progress.batches)
        if args.reinforce:
            self._step_by_task(sampled, gained, generator)
        else:
            self._step_by_sample(sampled, gained, signals, values, generator)
        return float(learned.mean())

    def _beyond_the_baseline(self, signals: torch.Tensor) -> torch.Tensor:
        """[agents, tasks, G] advantages of the four backends without critic."""
        mode = self.args.advantage_mode_of
        assert mode
        gained = [advantages(signal, mode) for signal in signals]
        return torch.stack([normalized(a) if self.args.normalizes else a for a in gained])

    def _step_by_task(self, sampled: Sequence[SampledItem], gained: torch.Tensor, generator: Random) -> None:
        """Steps on `train_batch_size` tasks each, all their responses together."""
        batch = [_samples(s, range(self.args.num_generations)) for s in sampled]
        order = list(range(len(batch)))
        generator.shuffle(order)
        for start in range(0, len(order), self.args.batch_size):
            numbers = order[start : start + self.args.batch_size]
            worth = [gained[:, k].tolist() for k in numbers]
            self._policy_step([batch[k] for k in numbers], worth, [sampled[k] for k in numbers])

    def _step_by_sample(
        self, sampled: Sequence[SampledItem], gained: torch.Tensor, signals: torch.Tensor, values: torch.Tensor,
        generator: Random,
    ) -> None:  # fmt: skip
        """Steps on `train_batch_size` responses each: the actors, then the critics on the same. Value heads learn with their
        actors.
        """
        args = self.args
        order = [(k, g) for k in range(len(sampled)) for g in range(self.args.num_generations)]
        generator.shuffle(order)
        for start in range(0, len(order), self.args.batch_size):
            chosen = order[start : start + self.args.batch_size]
            batch = [_samples(sampled[k], [g]) for k, g in chosen]
            worth = [[[a] for a in gained[:, k, g].tolist()] for k, g in chosen]
            tasks = [sampled[k] for k, _ in chosen]
            targets, old = (torch.stack([x[:, k, g] for k, g in chosen], 1) for x in (signals, values))
            if args.value_heads:
                wanted = ValueTargets(targets[..., None], old[..., None], args.value_clip_range, args.value_loss_coef)
                self._policy_step(batch, worth, tasks, wanted)
            else:
                skipped = self._policy_step(batch, worth, tasks)
                critics = self._critics()
                steps = critics.step([(sampled[k], g) for k, g in chosen], targets)
                self.reporter.critic_steps(steps, critics.cut_texts, skipped)
                for role, step in zip(critics.roles, steps):
                    if step.skipped and not skipped:
                        self._stop_if_hopeless(f"update {self.reporter.updates}: a number of {role} is not finite", tasks)

    def _policy_step(
        self, batch: Sequence[Samples], worth: Sequence[Sequence[Sequence[float]]], tasks: Sequence[SampledItem],
        values: ValueTargets | None = None,
    ) -> bool:  # fmt: skip
        """One step of the actors; whether it was skipped."""
        report = self._policy_learner().step(batch, worth, values)
        self.session.stepped(not report.skipped)
        self.reporter.policy_step(report)
        if report.culprit:
            agent, k = report.culprit
            what = f"update {self.reporter.updates} skipped on every agent: a number of agent {agent} is not finite"
            self._stop_if_hopeless(what, tasks if k is None else [tasks[k]])
        return report.skipped

    def _call_back(self, sampled: Sequence[SampledItem], learned: torch.Tensor) -> None:
        """Hands every response to `metrics_callback`, whose numbers are logged under rl/callback/."""
        if self._metrics_callback is None:
            return
        samples = [
            {"item": s.joint.item, "completions": [row[g] for row in s.texts], "reward": float(learned[k, g])}
            for k, s in enumerate(sampled)
            for g in range(self.args.num_generations)
        ]
        self.reporter.log({f"rl/callback/{name}": float(v) for name, v in dict(self._metrics_callback(samples)).items()})

    def _critics(self) -> Critics:
        assert self._critic_sources
        critics = Critics(self._critic_sources, self.args, self.session, self.seed)
        critics.start(self._total_updates)
        return critics

    def _policy_learner(self) -> PolicyGradientLearner:
        session, args = self.session, self.args
        if session.learner is None:
            frozen = frozenset(i for i in range(args.num_actors) if not args.learns(i))
            session.learner = PolicyGradientLearner(
                self.cluster, session.actors, max_tokens=args.max_tokens_per_micro_batch, max_pairs=session.max_pairs,
                frozen=frozen, critic_type=args.critic_type if args.value_heads else None,
                importance_clip=None if args.importance_correction == "none" else args.importance_clip,
            )  # fmt: skip
        return session.learner

    def _stop_if_hopeless(self, what: str, tasks: Sequence[SampledItem]) -> None:
        """Says what was not finite, and on which tasks; ends the run where it was so too often."""
        named = dict.fromkeys(s.joint.index for s in tasks)
        message = f"{what} (task {', '.join(map(str, named))})"
        self.display.say(message)
        if self.reporter.nonfinite_steps >= self.args.max_nonfinite_steps:
            raise NonFiniteError(f"{message}; that is step {self.reporter.nonfinite_steps} of max_nonfinite_steps")

    def _save_now(self, progress: Progress) -> None:
        """A checkpoint that is always written: a fitted reward model cost much."""
        if self._saver is not None and self._saver.every:
            self._saver.save(self.session, self.reporter, progress, self.evaluations, self._more_state())

    def _write_models(self, folder: Path) -> None:
        """Adds reward_model, where one is fitted, and critics, each with its tokenizer."""
        super()._write_models(folder)
        if REWARD_ROLE not in self.session.others:
            return
        if self.args.critic_roles:
            self._critics().save(folder)
        target = folder / REWARD_ROLE
        self.cluster.run({REWARD_ROLE: call(ScalarEngine.save_pretrained, target)})
        self._reward_source.text.tokenizer.save_pretrained(target)


def _samples(sampled: SampledItem, chosen: Sequence[int]) -> Samples:
    """Some of the candidates of a task, with the engine's log-probs where it gave them."""
    rows = [[row[g] for g in chosen] for row in sampled.completions]
    known = all(len(c.logprobs) == len(c.ids) for row in rows for c in row)
    return Samples(
        [p.ids for p in sampled.joint.prompts], [[c.ids for c in row] for row in rows],
        [[c.logprobs for c in row] for row in rows] if known else (),
    )  # fmt: skip


def _prompts(sampled: SampledItem) -> list[str]:
    return [p.text for p in sampled.joint.prompts]


class MARLHFTrainer(RewardAndPolicyLearning, MADPOTrainer):
    """Collects pairs once, fits a joint reward model R(h, a), and trains every agent on its scores.

    Fit: −mean log σ(R_w − R_l). Learning: −A · log π_i(a_i), A the learned reward of G joint responses to a task beyond
    the backend's baseline (`rl_algorithm`), minus β·KL to the first policies where `reference_kl_enabled`.
    The constructor's arguments are those of `PreferenceTrainer`.
    """

    kind: ClassVar[str] = "marlhf"
    config_class: ClassVar[type[MARLHFConfig]] = MARLHFConfig


class MARLHFIterTrainer(RewardAndPolicyLearning, MADPOIterTrainer):
    """`num_iterations` rounds of MARLHF. Each fits a new reward model, from the same start, to the pairs that the replay
    buffer selects, and then trains the policies on its scores. Collection, comparator and replay are `MADPOIterTrainer`'s;
    the anchor of the KL is the first policy in every round.
    """

    kind: ClassVar[str] = "marlhf_iter"
    config_class: ClassVar[type[MARLHFIterConfig]] = MARLHFIterConfig
    args: MARLHFIterConfig

    @property
    def _scores_learned(self) -> bool:  # type: ignore[override]
        """With preference_scoring_reward "reward_model", as soon as there is one: the newest is the oracle."""
        if self.args.preference_scoring_reward != "reward_model":
            return False
        kept = self.session.kept_of(REWARD_ROLE)
        if REWARD_ROLE not in self.session.others and kept is not None:  # it was fitted before the trainer was closed
            self.session.to_training()
            self._rewards().start(kept)
        return REWARD_ROLE in self.session.others

    def _score(self, items: Sequence[SampledItem]) -> None:
        self.session.to_training()
        each = [(item, j) for item in items for j in range(len(item.written[0])) if j not in item.missing]
        # A comparator's answer is read under the agents' own prompts, as it is in the pair.
        prompts = {item.joint.index: _prompts(item) for item in reversed(items)}
        texts = [
            [row[j] for row in (item.texts if len(item.texts) == self.args.num_actors else item.written)] for item, j in each
        ]
        learned = iter(self._rewards().scores([prompts[item.joint.index] for item, _ in each], texts))
        for item in items:
            rows = range(len(item.written[0]))
            item.scores = [MISSING if j in item.missing else Score(r := next(learned), r) for j in rows]
