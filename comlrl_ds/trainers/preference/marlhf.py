"""Multi-agent RLHF: a joint reward model fitted to the pairs, then policy learning on its scores."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from comlrl_ds.cluster import call
from comlrl_ds.config.errors import ConfigError, Problem
from comlrl_ds.config.marlhf import MARLHFConfig, MARLHFIterConfig
from comlrl_ds.learners.madpo import NonFiniteError
from comlrl_ds.learners.policy_gradient import GradientReport, PolicyGradientLearner, Samples
from comlrl_ds.maths.advantages import advantages, k3, normalized
from comlrl_ds.maths.seeds import generator_of
from comlrl_ds.preference.collection import SampledItem, Side
from comlrl_ds.preference.journal import Journal, Known, read_journal
from comlrl_ds.preference.prompts import JointPrompt
from comlrl_ds.preference.records import PreferencePair
from comlrl_ds.trainers.preference.conducted import conducted
from comlrl_ds.trainers.preference.madpo import MADPOTrainer
from comlrl_ds.trainers.preference.madpo_iter import MADPOIterTrainer
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
    _learner_of_policies: PolicyGradientLearner | None = None

    # --- set-up
    def _other_roles(self) -> Rates:
        args = self.args
        roles = {REWARD_ROLE: (args.reward_train_batch_size, args.reward_learning_rate)}
        if args.reference_kl_enabled:
            roles |= {f"reference.{i}": (1, args.agent_learning_rate) for i in range(args.num_actors)}
        return roles

    def _check_more(self, setup: TeamSetup) -> None:
        super()._check_more(setup)
        args = self.args
        if not args.reinforce:
            message = f"{args.rl_algorithm!r} is not there yet; write magrpo, mareinforce, marloo or maremax"
            raise ConfigError(Problem("rl_algorithm", message))
        scoring = getattr(args, "preference_scoring_reward", "task")
        for name, value, now in (
            ("importance_correction", args.importance_correction, "none"), ("preference_scoring_reward", scoring, "task"),
            ("oracle_workers", args.oracle_workers, 1),
        ):  # fmt: skip
            if value != now:
                raise ConfigError(Problem(name, f"{value!r} is not there yet; write {now}"))
        self._reward_source = read_reward_source(args, setup, setup.sources[0].startswith(str(self.run_dir.sources)))

    def _start_others(self, roles: list[str]) -> None:
        if REWARD_ROLE in roles:
            self._rewards().start()

    def _rewards(self) -> RewardLearner:
        return RewardLearner(self._reward_source, self.args, self.session, self.reporter, self.seed)

    # --- a round
    @conducted
    def train_on_pairs(self, pairs: Sequence[PreferencePair], progress: Progress | None = None) -> None:
        """Fits a new reward model to the pairs, then `num_train_epochs` passes of policy learning over the tasks."""
        progress = progress or Progress()
        prompts = self.setup.prompt_builder().build(self.train_dataset)
        args, size = self.args, self.args.rollout_buffer_size
        buffers = math.ceil(len(prompts) / size)
        if not progress.total_updates:
            per_buffer = math.ceil(size / args.batch_size)
            rounds = self.rounds - progress.round + 1
            progress.total_updates = self.reporter.updates + rounds * args.num_train_epochs * buffers * per_buffer
            self._start_schedules(progress.total_updates)
        rewards = self._rewards()
        if not progress.fitted:
            self.session.to_training()
            rewards.start()
            rewards.fit(pairs, progress.round)
            progress.fitted = True
            self._save_now(progress)
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
        args, team = self.args, self.setup.team
        stream = f"policy.{progress.epoch}"
        side = Side(team, self.session.policies(), prompts, args.num_generations, stream)
        sampled = self._sampler().sample_sides(
            [side], self._train_sampling, round=progress.round, journal=journal, known=known, scored=False
        )[0]
        self.reporter.syncs(self.session.syncs)
        self.session.to_training()
        each = [(s, g) for s in sampled for g in range(args.num_generations)]
        flat = rewards.scores([_prompts(s) for s, _ in each], [[row[g] for row in s.written] for s, g in each])
        learned = torch.tensor(flat, dtype=torch.float64).view(len(sampled), args.num_generations)
        kls = self._reference_kl(sampled)
        gained = []
        for i in range(args.num_actors):
            signal = learned if kls is None else learned - args.reference_kl_coef * kls[i]
            mode = args.advantage_mode_of
            assert mode
            gain = advantages(signal, mode)
            gained.append(normalized(gain) if args.normalizes else gain)
        self.reporter.buffer(learned, gained, None if kls is None else (kls, args.reference_kl_coef))
        batch = [Samples([p.ids for p in s.joint.prompts], [[c.ids for c in row] for row in s.completions]) for s in sampled]
        order = list(range(len(batch)))
        generator_of(self.seed, "policy_order", progress.round, progress.epoch, progress.batches).shuffle(order)
        for start in range(0, len(order), args.batch_size):
            numbers = order[start : start + args.batch_size]
            worth = [[gained[i][k].tolist() for i in range(args.num_actors)] for k in numbers]
            report = self._policy_learner().step([batch[k] for k in numbers], worth)
            self.session.steps += not report.skipped
            self.reporter.policy_step(report)
            if report.skipped:
                self._stop_if_hopeless(report, [sampled[k] for k in numbers])
        return float(learned.mean())

    def _reference_kl(self, sampled: Sequence[SampledItem]) -> list[torch.Tensor] | None:
        """[agents] of [tasks, G]: k3 of each completion, Σ_t exp(d_t) − d_t − 1; None where it is off."""
        from comlrl_ds.engines.engine import PolicyEngine
        from comlrl_ds.engines.frozen import FrozenEngine

        if not self.args.reference_kl_enabled:
            return None
        self._start_references()
        rows = [
            [(s.joint.prompts[i].ids, c.ids) for s in sampled for c in s.completions[i]] for i in range(self.args.num_actors)
        ]
        actors = self.session.actors
        own = self.cluster.run({role: call(PolicyEngine.completion_logprobs, r) for role, r in zip(actors, rows)})
        anchors = [f"reference.{i}" for i in range(len(actors))]
        other = self.cluster.run({role: call(FrozenEngine.completion_logprobs, r) for role, r in zip(anchors, rows)})
        kls = []
        for actor, anchor in zip(actors, anchors):
            sums = [k3(torch.tensor(p), torch.tensor(q)).sum() for p, q in zip(own[actor], other[anchor])]
            kls.append(torch.stack(sums).view(len(sampled), -1))
        return kls

    def _start_references(self) -> None:
        """The agents as they stood when the trainer was built, in every round."""
        from comlrl_ds.engines.build import build_reference

        session, builds = self.session, {}
        for i, source in enumerate(self.setup.sources):
            role = f"reference.{i}"
            if role not in session.others:
                builds[role] = call(
                    build_reference, source, session.plan(role), attn_implementation=session.settings.attn_implementation,
                    chunk=self.args.logprob_chunk,
                )  # fmt: skip
        if builds:
            session.start(builds)

    def _policy_learner(self) -> PolicyGradientLearner:
        session, args = self.session, self.args
        if session.learner is None:
            frozen = frozenset(i for i in range(args.num_actors) if not args.learns(i))
            session.learner = PolicyGradientLearner(
                self.cluster, session.actors, max_tokens=args.max_tokens_per_micro_batch, max_pairs=session.max_pairs,
                frozen=frozen,
            )  # fmt: skip
        return session.learner

    def _stop_if_hopeless(self, report: GradientReport, tasks: Sequence[SampledItem]) -> None:
        assert report.culprit
        agent, k = report.culprit
        named = [tasks[k].joint.index] if k is not None else [s.joint.index for s in tasks]
        message = (
            f"update {self.reporter.updates} skipped on every agent: a number of agent {agent} is not finite"
            f" (task {', '.join(map(str, named))})"
        )
        self.display.say(message)
        if self.reporter.nonfinite_steps >= self.args.max_nonfinite_steps:
            raise NonFiniteError(f"{message}; that is step {self.reporter.nonfinite_steps} of max_nonfinite_steps")

    def _save_now(self, progress: Progress) -> None:
        """A checkpoint that is always written: a fitted reward model cost much."""
        if self._saver is not None and self._saver.every:
            self._saver.save(self.session, self.reporter, progress, self.evaluations, self._more_state())

    def save_model(self, folder: Any) -> None:
        """Writes agent_0, agent_1 … and, where one is fitted, reward_model, each with its tokenizer."""
        super().save_model(folder)
        self._save_reward_model(folder)

    @conducted
    def _save_reward_model(self, folder: Any) -> None:
        from pathlib import Path

        from comlrl_ds.engines.scalar import ScalarEngine

        if REWARD_ROLE not in self.session.others:
            return
        target = Path(folder).absolute() / REWARD_ROLE
        self.cluster.run({REWARD_ROLE: call(ScalarEngine.save_pretrained, target)})
        self._reward_source.text.tokenizer.save_pretrained(target)


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
