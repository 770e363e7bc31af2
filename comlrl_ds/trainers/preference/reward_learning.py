"""The reward model of a trainer: where it comes from, how it is fitted to a round's pairs, and how it scores responses."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from comlrl_ds.cluster import call
from comlrl_ds.config.errors import ConfigError, Problem
from comlrl_ds.config.marlhf import MARLHFConfig
from comlrl_ds.engines.scalar import ScalarEngine
from comlrl_ds.learners.madpo import NonFiniteError
from comlrl_ds.learners.scalar import FitScore, RewardFit, ScalarStep, fit_score
from comlrl_ds.maths.seeds import generator_of, seed_of
from comlrl_ds.preference.joint_text import JointText
from comlrl_ds.preference.records import PreferencePair
from comlrl_ds.rollout.start import model_limits
from comlrl_ds.trainers.preference.reporting import Reporter
from comlrl_ds.trainers.preference.session import Session
from comlrl_ds.trainers.preference.team import TeamSetup

REWARD_ROLE = "reward_model"
# A tokenizer without a limit of its own states one that no text reaches.
NO_LIMIT = 1 << 20


@dataclass
class RewardSource:
    """A reward model that has been checked; it holds no weights. `text` makes token ids of joint responses."""

    folder: str
    text: JointText


def read_reward_source(args: MARLHFConfig, setup: TeamSetup, is_object: bool) -> RewardSource:
    """The backbone and tokenizer of the reward model.

    Args:
        is_object: whether the first actor is a model object, which has no source to start a reward model from.

    Raises:
        ConfigError: no source, no such folder, or no tokenizer in it.
    """
    from comlrl_ds.engines.loading import load_tokenizer, local_folder

    where = "reward_model_name"
    if args.reward_model_name is None and is_object:
        raise ConfigError(Problem(where, "required when actors are model objects: the backbone of the reward model"))
    folder = setup.sources[0]
    if args.reward_model_name is not None:
        folder = local_folder(args.reward_model_name, where)
    tokenizer = load_tokenizer(folder, where) if args.reward_model_name is not None else setup.team.tokenizers[0]
    longest = longest_text(tokenizer, folder)
    return RewardSource(folder, JointText(tokenizer, min(longest, args.reward_max_length or longest)))


def longest_text(tokenizer: Any, folder: str) -> int:
    """Tokens that a model takes at once, as its tokenizer and its positions say."""
    limit = getattr(tokenizer, "model_max_length", None)
    positions = model_limits(folder)[0]
    return min(positions, limit) if limit and limit < NO_LIMIT else positions


class RewardLearner:
    """Fits the reward model of a round, from the same start each time, and scores joint responses with it.

    Args:
        session: runs the engine. reporter: gets the metrics. seed: the run's.
    """

    def __init__(self, source: RewardSource, args: MARLHFConfig, session: Session, reporter: Reporter, seed: int) -> None:
        self._source, self._args, self._session, self._reporter, self._seed = source, args, session, reporter, seed

    def start(self, kept: str | None = None) -> None:
        """Loads a fresh model: the source's backbone, and the head of the run's seed.

        Args:
            kept: folder of a fitted one, which is loaded instead.
        """
        from comlrl_ds.engines.build import build_scalar

        args, session = self._args, self._session
        build = call(
            build_scalar, self._source.folder, session.plan(REWARD_ROLE), dropout=not args.disable_dropout,
            attn_implementation=session.settings.attn_implementation, checkpointing=args.gradient_checkpointing,
            head_seed=seed_of(self._seed, "reward_head"), freeze_backbone=args.reward_freeze_backbone,
            lora=args.reward_lora, dropout_seed=session.dropout_seed(REWARD_ROLE), current=kept,
        )  # fmt: skip
        session.start({REWARD_ROLE: build})

    def start_schedule(self, steps: int) -> None:
        """The learning rate's, where the DeepSpeed file has one."""
        self._session.cluster.run({REWARD_ROLE: call(ScalarEngine.start_schedule, steps)})

    def fit(self, pairs: Sequence[PreferencePair], round: int) -> None:
        """`reward_num_train_epochs` passes over the pairs in seeded order; those of held-out tasks only measure it.

        Of the pairs that are fitted, the last pass itself tells: each counts before the step that learns from it.
        """
        args, fit, started = self._args, self._fit, time.perf_counter()
        train, held_out = split_by_task(pairs, args.reward_eval_fraction, self._seed, round)
        text, cut_before = self._source.text, self._source.text.cut_responses
        rows = [self._rows(p) for p in train]
        if cut := text.cut_responses - cut_before:
            self._reporter.say(
                f"note: {cut} of the {2 * len(rows)} joint texts have more than {text.max_length} tokens even without prompts, "
                f"so their responses lost their ends; {self._remedy()}"
            )
        self.start_schedule(args.reward_num_train_epochs * math.ceil(len(rows) / args.reward_train_batch_size))
        steps: list[ScalarStep] = []
        skipped = 0
        margins = [math.nan] * len(rows)
        for epoch in range(args.reward_num_train_epochs):
            order = list(range(len(rows)))
            generator_of(self._seed, "reward_order", round, epoch).shuffle(order)
            for start in range(0, len(order), args.reward_train_batch_size):
                batch = order[start : start + args.reward_train_batch_size]
                step = fit.step([rows[k] for k in batch])
                steps.append(step)
                for k, margin in zip(batch, step.values):
                    margins[k] = margin
                skipped += step.skipped
                if skipped >= args.max_nonfinite_steps:
                    raise NonFiniteError(f"reward fit of round {round}: {skipped} steps with a number that is not finite")
        own = fit_score(margins, [p.winner_reward - p.loser_reward for p in train])
        other = fit_score(fit.margins([self._rows(p) for p in held_out]), [p.winner_reward - p.loser_reward for p in held_out])
        found = {f"reward/{name}": value for name, value in _metrics(own).items()}
        found |= {f"reward/eval_{name}": value for name, value in _metrics(other).items()}
        self._reporter.log(
            found
            | {
                "reward/steps": len(steps), "reward/cut_texts": text.cut, "reward/cut_responses": text.cut_responses,
                "reward/seconds": time.perf_counter() - started,
                "reward/first_loss": math.fsum(s.loss for s in steps[:10]) / max(1, len(steps[:10])),
            }
        )  # fmt: skip
        held = f", {other.accuracy:.2f} on {other.pairs} held out" if other.pairs else ""
        self._reporter.say(f"reward model: accuracy {own.accuracy:.2f} on {own.pairs} pairs{held}, {len(steps)} steps")

    def scores(self, prompts: Sequence[Sequence[str]], responses: Sequence[Sequence[str]]) -> list[float]:
        """R of joint responses, given as each agent's texts."""
        return self._fit.values([self._source.text.ids(p, r) for p, r in zip(prompts, responses)])

    def _remedy(self) -> str:
        """What gives joint texts more room."""
        if self._args.reward_max_length == self._source.text.max_length:
            return "raise args.reward_max_length"
        return "that is as long as the reward model reads: lower args.max_new_tokens, or take another reward model"

    @property
    def _fit(self) -> RewardFit:
        return RewardFit(self._session.cluster, REWARD_ROLE, self._args.max_tokens_per_micro_batch)

    def _rows(self, pair: PreferencePair) -> tuple[tuple[int, ...], tuple[int, ...]]:
        text = self._source.text
        return text.ids(pair.prompts, pair.winner_completions), text.ids(pair.prompts, pair.loser_completions)


def _metrics(score: FitScore) -> dict[str, float]:
    found = {"loss": score.loss, "accuracy": score.accuracy, "margin": score.margin, "pairs": score.pairs}
    return found | {f"accuracy_{size}_gap": value for size, value in zip(("small", "middle", "large"), score.by_gap)}


def split_by_task(
    pairs: Sequence[PreferencePair], fraction: float, seed: int, round: int
) -> tuple[list[PreferencePair], list[PreferencePair]]:
    """(pairs to fit, pairs held out): of each task all or none, and at least one task is fitted."""
    tasks = sorted({p.item for p in pairs})
    count = min(round_half_up(fraction * len(tasks)), len(tasks) - 1)
    out = set(generator_of(seed, "reward_eval", round).sample(tasks, count)) if count > 0 else set()
    return [p for p in pairs if p.item not in out], [p for p in pairs if p.item in out]


def round_half_up(x: float) -> int:
    return math.floor(x + 0.5)
