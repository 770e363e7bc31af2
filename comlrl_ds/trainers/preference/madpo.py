"""Multi-Agent Direct Preference Optimization: policies learn directly from preferences between joint responses."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, ClassVar

from comlrl_ds.config.errors import ConfigError, Problem
from comlrl_ds.learners.madpo import MadpoLearner, NonFiniteError
from comlrl_ds.maths.seeds import generator_of
from comlrl_ds.preference.asked import identity_of, mark
from comlrl_ds.preference.collection import TARGET, JointSampler
from comlrl_ds.preference.journal import Journal, Known, finite, read_journal
from comlrl_ds.preference.pairs import Collected, pairs_from, with_gradient
from comlrl_ds.preference.prompts import JointPrompt
from comlrl_ds.preference.records import PreferencePair, write_round
from comlrl_ds.preference.round_files import RoundFolder
from comlrl_ds.rollout.base import Sampling
from comlrl_ds.trainers.preference.base import PreferenceTrainer
from comlrl_ds.trainers.preference.conducted import conducted
from comlrl_ds.trainers.preference.resuming import ResumableTrainer
from comlrl_ds.trainers.preference.saving import Progress


class MADPOTrainer(ResumableTrainer, PreferenceTrainer):
    """Collects preference pairs once from the initial policies, then trains every agent on them.

    loss = −mean log σ(η Σ_i m_i), m_i the difference of agent i's log-probs of the winning and the losing response.
    The constructor's arguments are those of `PreferenceTrainer`.
    """

    kind: ClassVar[str] = "madpo"

    @conducted
    def train(
        self, resume_from_checkpoint: str | Path | None = None, checkpoint_dir: str | Path | None = None,
        checkpoint_interval: int | None = None, checkpoint_total_limit: int | None = None, **generation_kwargs: Any,
    ) -> None:  # fmt: skip
        """Collect, then learn; an iterative trainer repeats this. Without any pair nothing is trained.

        A further call goes on from the policies as they are: it collects and learns once more, with the rounds numbered on, and
        learning-rate schedules begin anew; optimizers go on unless the trainer was closed. A call that an error or Ctrl-C
        interrupted is continued by the next one where it stopped.

        With `resume`, an interrupted run goes on: nothing that it sampled, scored or paid for is sampled, scored or paid
        for again, training begins at the newest checkpoint, and the end is that of a run without interruption.

        Args:
            resume_from_checkpoint: "auto", or a checkpoint's folder; a trainer without a run_dir of its own goes on in the
                checkpoint's. None: as the constructor's `resume` says.
            checkpoint_dir: where checkpoints are written and looked for; None: checkpoints/ of the run's folder.
            checkpoint_interval, checkpoint_total_limit: replace the constructor's.
            generation_kwargs: temperature, top_p, top_k or min_new_tokens, for the collection.
        """
        if self.train_dataset is None:
            raise ConfigError(Problem("train_dataset", "required to train"))
        sampling = self._train_sampling = self._sampling(generation_kwargs)
        self._checkpoint_options(resume_from_checkpoint, checkpoint_dir, checkpoint_interval, checkpoint_total_limit)
        if self._evaluates:
            self._eval_prompts(None, self.setup.prompt_builder())  # an over-long one shows before anything is loaded
        progress = self._begin(resumes=resume_from_checkpoint is not None)
        if progress is None:
            return
        self.progress = progress
        for round in range(progress.first_round, progress.round):  # replay and rewards mix them with what follows
            self._check_asked(read_journal(self.run_dir.journal(round)), round, sampling)
        pairs: list[PreferencePair] = []
        while progress.round <= self._last_round(progress):
            selected = self._select(self._pairs_of(progress, sampling), progress)
            if selected:
                pairs = selected
                self.train_on_pairs(pairs, progress)
            self._end_round(progress)
        self._finish(pairs, progress)

    # --- pairs
    @conducted
    def collect_preferences(self, sampling: Sampling, round: int = 1, known: Known | None = None) -> Collected:
        """Joint responses to every task, their scores, and the pairs that are kept; on disk when this returns."""
        builder = self.setup.prompt_builder()
        prompts = builder.build_some(self.train_dataset)
        self._prompt_others(prompts)
        pool, sampler = self.session.pool(), self._sampler()
        started, tokens_before, seconds_before = time.perf_counter(), pool.generated_tokens, pool.generate_seconds
        file = self.run_dir.journal(round)
        known = known or read_journal(file)
        with Journal(file) as journal, self.display.bar("collecting", self._sides * len(prompts)) as bar:

            def progress(items: int, tokens: int) -> None:
                rate = (pool.generated_tokens - tokens_before) / (time.perf_counter() - started)
                bar.advance(items, f"{rate:.0f} tokens/s")

            collected, more = self._compare(sampler, prompts, sampling, round, journal, progress, known)
            collected = with_gradient(collected, self._teaches)
            self._tell_not_reused(sampler)
            tokenizers = self.setup.team.tokenizers
            write_round(self.replay_folder, round, collected.pairs, collected.sampled, tokenizers)
            self.round_folder.make_index(round)
            rate = (pool.generated_tokens - tokens_before) / max(pool.generate_seconds - seconds_before, 1e-9)
            seconds = time.perf_counter() - started
            report = self.reporter.collection_report(collected, builder, sampler.oracle_errors, seconds, rate)
            report["values"] |= {k: v if math.isfinite(v) else None for k, v in more.items()}
            report["text"] += self._of_comparison(report["values"])
            journal.append("sealed", round=round, report=report, asked=self._asked(prompts, sampling))
        self._report = report
        return collected

    def _prompt_others(self, prompts: Sequence[JointPrompt]) -> None:
        """Makes the prompts of others who answer the same tasks, so that one that cannot be used shows before engines start."""

    def _compare(
        self, sampler: Any, prompts: Sequence[JointPrompt], sampling: Sampling, round: int, journal: Journal,
        progress: Callable[[int, int], None], known: Known,
    ) -> tuple[Collected, dict[str, float]]:  # fmt: skip
        """Samples, scores and selects: (the round's pairs, metrics beside those of every collection)."""
        args = self.args
        sampled = sampler.sample(
            prompts, self.session.policies(), sampling, stream=TARGET, round=round,
            candidates=args.preference_num_candidates, journal=journal, progress=progress, known=known,
        )  # fmt: skip
        collected = pairs_from(
            sampled, mode=args.pair_selection, cap=args.preference_pairs_per_sample, run_seed=self.seed, round=round,
            max_invalid_fraction=args.max_invalid_fraction,
        )  # fmt: skip
        return collected, {}

    def _teaches(self, pair: PreferencePair) -> bool:
        """Whether a pair has a gradient: winner and loser of some learning agent differ in the tokens that are scored."""
        end = None if self.args.scores_last_token else -1
        learning = (i for i in range(self.args.num_actors) if self.args.learns(i))
        return any(pair.tokens[i].winner[:end] != pair.tokens[i].loser[:end] for i in learning)

    def _asked(self, prompts: Sequence[JointPrompt], sampling: Sampling) -> dict[str, Any]:
        """What a round is collected from, so that a resumed run can tell whether it would be collected in the same way."""
        tasks = [[j.index, j.item, [p.ids for p in j.prompts]] for j in prompts]
        function = identity_of(self.setup.oracle)
        return {"tasks": mark(tasks), "sampling": finite(sampling.as_dict()), "reward function": str(function)}

    def _check_asked(self, known: Known, round: int, sampling: Sampling) -> None:
        """Raises ConfigError where a finished round on disk was collected in another way than it would be now."""
        before = known.asked.get(round)
        if not before:
            return
        now = self._asked(self.setup.prompt_builder().build(self.train_dataset), sampling)
        problems = [
            Problem(
                "run.dir",
                f"round {round} in {str(self.run_dir.path)!r} was collected with other {name}"
                + ("" if name == "tasks" else f" ({before.get(name)}; now {now[name]})")
                + "; set that back, or give another run.dir",
            )
            for name in now
            if before.get(name) != now[name]
        ]
        if problems:
            raise ConfigError(problems)

    def _tell_not_reused(self, sampler: JointSampler) -> None:
        for what, count in sampler.not_reused.items():
            if what == "completions":
                why = "prompts, limits, sampling or weights have changed"
                text = f"{count} completions of the interrupted run are sampled anew: {why}"
            else:
                text = f"{count} scores by {what} are not reused: the reward function is {sampler.function} now"
            self.display.say(text)

    _sides = 1

    def _of_comparison(self, values: dict[str, Any]) -> str:
        """What the line of a collection says besides."""
        return ""

    def _pairs_of(self, progress: Progress, sampling: Sampling) -> list[PreferencePair]:
        """The pairs of the round in work: read back where they are complete on disk, else collected."""
        round = progress.round
        known = read_journal(self.run_dir.journal(round))
        if round in known.sealed:
            self._check_asked(known, round, sampling)
            pairs, report = self.round_folder.sampled(round), known.sealed[round]
        else:
            pairs = self.collect_preferences(sampling, round, known).pairs
            report = self._report
        if not progress.collected:
            self.reporter.collected(report)
            progress.collected = True
        return pairs

    def _select(self, pairs: list[PreferencePair], progress: Progress) -> list[PreferencePair]:
        """What the round trains on."""
        return pairs

    @property
    def replay_folder(self) -> Path:
        """Where round files are."""
        return self.run_dir.replay

    @property
    def round_folder(self) -> RoundFolder:
        return RoundFolder(self.replay_folder, self.setup.team.tokenizers)

    # --- learning
    @conducted
    def train_on_pairs(self, pairs: Sequence[PreferencePair], progress: Progress | None = None) -> None:
        """`num_train_epochs` passes over the pairs in seeded order, one joint step per batch; on from `progress`."""
        args, session, reporter = self.args, self.session, self.reporter
        progress = progress or Progress()
        steps = args.num_train_epochs * math.ceil(len(pairs) / args.batch_size)
        self._expect_updates(progress, steps * (self._last_round(progress) - progress.round + 1))
        learner = self._learner()
        with self.display.bar("training", steps) as bar:
            while progress.epoch < args.num_train_epochs:
                order = list(range(len(pairs)))
                generator_of(self.seed, "order", progress.round, progress.epoch).shuffle(order)
                for start in range(progress.batches * args.batch_size, len(order), args.batch_size):
                    if self._evaluates and reporter.updates % args.eval_interval == 0:
                        self._evaluate_once(f"at update {reporter.updates}" if reporter.updates else "before")
                    numbers = order[start : start + args.batch_size]
                    batch = [pairs[k] for k in numbers]
                    session.to_training()
                    report = learner.step([p.tokens for p in batch])
                    session.stepped(not report.skipped)
                    reporter.step(report, batch)
                    if report.skipped:
                        file = self.round_folder.file(progress.round)
                        message = reporter.nonfinite(report, batch, numbers, file)
                        if reporter.nonfinite_steps >= args.max_nonfinite_steps:
                            raise NonFiniteError(f"{message}; that is step {reporter.nonfinite_steps} of max_nonfinite_steps")
                    bar.advance(1, f"loss {report.loss:.4f}, margin {report.joint_margins.mean():+.2f}")
                    progress.batches += 1
                    if start + args.batch_size < len(order):
                        self._save_if_due(progress, end_of_epoch=False)
                progress.epoch, progress.batches = progress.epoch + 1, 0
                if progress.epoch < args.num_train_epochs:
                    self._save_if_due(progress, end_of_epoch=True)
        self.display.say(f"trained {steps} steps on {len(pairs)} pairs")

    def _evaluate_once(self, name: str) -> None:
        """Unless these policies have been evaluated."""
        if self.reporter.evaluated_at != self.reporter.updates:
            self._evaluate_and_report(name)

    def _end_round(self, progress: Progress) -> None:
        progress.next_round()

    def _finish(self, pairs: Sequence[PreferencePair], progress: Progress) -> None:
        """Saves the agents and says how they are."""
        if self.session.steps == progress.first_step:
            self.display.say("no pair of different scores: nothing to learn from, the policies are unchanged")
            self._end_call()
            return
        self._save_own(self.run_dir.final)  # first: what follows needs engines, and one may have died meanwhile
        if self._evaluates:
            self._evaluate_once("after")
        if pairs:
            self._report_logprob_gap(pairs)
        self._end_call()
        self.display.say(f"weights, metrics and samples are in {self.run_dir.path}")
        self._show_results()

    def _show_results(self) -> None:
        if self.evaluations:
            self.display.reward_table([self.evaluations[0], self.evaluations[-1]])

    @property
    def _evaluates(self) -> bool:
        return self.eval_dataset is not None and self.args.eval_interval > 0

    def _learner(self) -> MadpoLearner:
        """Made once: later the allocators hold what they have freed, and its memory looks taken."""
        session, args = self.session, self.args
        session.to_training()
        if session.learner is None:
            frozen = frozenset(i for i in range(args.num_actors) if not args.learns(i))
            session.learner = MadpoLearner(
                self.cluster, session.actors, args.dpo_beta, score_last_token=args.scores_last_token,
                max_tokens=args.max_tokens_per_micro_batch, max_pairs=session.max_pairs, margin_pass=args.margin_pass,
                frozen=frozen,
            )  # fmt: skip
        return session.learner
