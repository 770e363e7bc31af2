"""Multi-Agent Direct Preference Optimization: policies learn directly from preferences between joint responses."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from typing import Any, ClassVar

from comlrl_ds.cluster import call
from comlrl_ds.config.errors import ConfigError, Problem
from comlrl_ds.learners.madpo import MadpoLearner, NonFiniteError
from comlrl_ds.maths.seeds import generator_of
from comlrl_ds.preference.collection import Collected, pairs_from
from comlrl_ds.preference.journal import Journal, read_journal
from comlrl_ds.preference.records import PreferencePair, write_round
from comlrl_ds.rollout.base import Sampling
from comlrl_ds.runs.checkpoints import Checkpoint, CheckpointStore
from comlrl_ds.trainers.preference.base import PreferenceTrainer
from comlrl_ds.trainers.preference.conducted import conducted
from comlrl_ds.trainers.preference.saving import Progress, Saver, find_checkpoint, restore, restore_engines


class MADPOTrainer(PreferenceTrainer):
    """Collects preference pairs once from the initial policies, then trains every agent on them.

    loss = −mean log σ(η Σ_i m_i), m_i the difference of agent i's log-probs of the winning and the losing response.
    The constructor's arguments are those of `PreferenceTrainer`.
    """

    kind: ClassVar[str] = "madpo"

    @conducted
    def train(self, **generation_kwargs: Any) -> None:
        """Collect, then learn. Without any non-tied pair nothing is trained, and the policies stay as they are.

        With `resume`, an interrupted run goes on: nothing that it sampled or scored is sampled or scored again, training
        begins at the newest checkpoint, and the end is that of a run without interruption.

        Args:
            generation_kwargs: temperature, top_p, top_k or min_new_tokens, for the collection.
        """
        if self.train_dataset is None:
            raise ConfigError(Problem("train_dataset", "required to train"))
        sampling = self._sampling(generation_kwargs)
        if self._evaluates:
            self._eval_prompts(None)  # an over-long one shows before anything is loaded
        if self.run_dir.complete:
            self.display.say(f"this run is complete; its results are in {self.run_dir.path}")
            return
        checkpoint, progress = self._go_on()
        collected = self.collect_preferences(sampling, report=checkpoint is None)
        if not collected.pairs:
            self.display.say("no pair of different scores: nothing to learn from, the policies are unchanged")
            self.run_dir.mark_complete()
            return
        self.train_on_pairs(collected.pairs, checkpoint=checkpoint, progress=progress)
        self.save_model(self.run_dir.final)  # first: what follows needs engines, and one may have died meanwhile
        if self._evaluates:
            self._evaluate_and_report("after")
        self._report_logprob_gap(collected.pairs)
        self.run_dir.mark_complete()
        self.display.say(f"weights, metrics and samples are in {self.run_dir.path}")
        if self.evaluations:
            self.display.reward_table([self.evaluations[0], self.evaluations[-1]])

    @conducted
    def collect_preferences(self, sampling: Sampling, round: int = 1, report: bool = True) -> Collected:
        """Joint responses to every task, their scores, and the pairs that are kept; on disk when this returns."""
        args, builder = self.args, self.setup.prompt_builder()
        prompts = builder.build(self.train_dataset)
        pool, sampler = self.session.pool(), self._sampler()
        started, tokens_before, seconds_before = time.perf_counter(), pool.generated_tokens, pool.generate_seconds
        known = read_journal(self.run_dir.journal)
        with Journal(self.run_dir.journal) as journal, self.display.bar("collecting", len(prompts)) as bar:

            def progress(items: int, tokens: int) -> None:
                rate = (pool.generated_tokens - tokens_before) / (time.perf_counter() - started)
                bar.advance(items, f"{rate:.0f} tokens/s")

            sampled = sampler.sample(
                prompts, self.session.policies(), sampling, stream="target", round=round,
                candidates=args.preference_num_candidates, journal=journal, progress=progress, known=known,
            )  # fmt: skip
        collected = pairs_from(
            sampled, mode=args.pair_selection, cap=args.preference_pairs_per_sample, run_seed=self.seed, round=round,
            max_invalid_fraction=args.max_invalid_fraction,
        )  # fmt: skip
        write_round(self.run_dir.replay, round, collected.pairs, collected.sampled)
        rate = (pool.generated_tokens - tokens_before) / max(pool.generate_seconds - seconds_before, 1e-9)
        if report:
            self.reporter.collection(collected, builder, sampler.oracle_errors, time.perf_counter() - started, rate)
        return collected

    @conducted
    def train_on_pairs(
        self, pairs: Sequence[PreferencePair], round: int = 1, *, checkpoint: Checkpoint | None = None,
        progress: Progress | None = None,
    ) -> None:  # fmt: skip
        """`num_train_epochs` passes over the pairs in seeded order, one joint step per batch; from a checkpoint on."""
        from comlrl_ds.engines.engine import PolicyEngine

        args, session, reporter = self.args, self.session, self.reporter
        steps = args.num_train_epochs * math.ceil(len(pairs) / args.batch_size)
        progress = progress or Progress(reporter.updates + steps)
        saver = self._saver()
        self.cluster.run({role: call(PolicyEngine.start_schedule, progress.total_updates) for role in session.actors})
        if checkpoint:
            restore_engines(checkpoint, session)
        learner = self._learner()
        with self.display.bar("training", steps) as bar:
            while progress.epoch < args.num_train_epochs:
                order = list(range(len(pairs)))
                generator_of(self.seed, "order", round, progress.epoch).shuffle(order)
                for start in range(progress.batches * args.batch_size, len(order), args.batch_size):
                    if self._evaluates and reporter.updates % args.eval_interval == 0:
                        self._evaluate_and_report(f"at update {reporter.updates}" if reporter.updates else "before")
                    numbers = order[start : start + args.batch_size]
                    batch = [pairs[k] for k in numbers]
                    session.to_training()
                    report = learner.step([p.tokens for p in batch])
                    session.steps += not report.skipped
                    reporter.step(report, batch)
                    if report.skipped:
                        file = self.run_dir.replay / f"iteration_{round:04d}.json"
                        message = reporter.nonfinite(report, batch, numbers, file)
                        if reporter.nonfinite_steps >= args.max_nonfinite_steps:
                            raise NonFiniteError(f"{message}; that is step {reporter.nonfinite_steps} of max_nonfinite_steps")
                    bar.advance(1, f"loss {report.loss:.4f}, margin {report.joint_margins.mean():+.2f}")
                    progress.batches += 1
                    if start + args.batch_size < len(order) and saver.due(reporter.updates, progress, False):
                        saver.save(session, reporter, progress, self.evaluations)
                progress.epoch, progress.batches = progress.epoch + 1, 0
                if saver.due(reporter.updates, progress, True):
                    saver.save(session, reporter, progress, self.evaluations)
        self.display.say(f"trained {steps} steps on {len(pairs)} pairs")

    def _saver(self) -> Saver:
        return Saver(CheckpointStore(self.run_dir.checkpoints, self._checkpoint_limit), *self._checkpoint_every)

    def _go_on(self) -> tuple[Checkpoint | None, Progress | None]:
        """With `resume`, counters and metrics go back to the checkpoint that the run goes on from, if there is one."""
        if self._resume == "never" or not self.run_dir.holds_run:
            return None, None
        checkpoint, skipped = find_checkpoint(self._saver().store, self._resume)
        for line in skipped:
            self.display.say(f"skipped: {line}")
        session, reporter = self.session, self.reporter
        if checkpoint is None:
            reporter.restore(None)
            self.display.say(f"going on with the run in {self.run_dir.path}: what is in its journal is not sampled again")
            return None, None
        progress, self.evaluations = restore(checkpoint, session, reporter)
        self.display.say(f"going on from update {reporter.updates} of {progress.total_updates}, {checkpoint.folder}")
        return checkpoint, progress

    @property
    def _evaluates(self) -> bool:
        return self.eval_dataset is not None and self.args.eval_interval > 0

    def _learner(self) -> MadpoLearner:
        actors = self.session.actors
        self.session.to_training()
        return MadpoLearner(
            self.cluster, actors, self.args.dpo_beta, score_last_token=self.args.scores_last_token,
            max_tokens=self.args.max_tokens_per_micro_batch, max_pairs=self.session.max_pairs,
            margin_pass=self.args.margin_pass,
        )  # fmt: skip
