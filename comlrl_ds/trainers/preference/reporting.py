"""What a trainer writes to metrics.jsonl and prints, so that the loops hold the algorithm only."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from comlrl_ds.config.madpo import MADPOConfig
from comlrl_ds.learners.madpo import StepReport
from comlrl_ds.learners.policy_gradient import GradientReport
from comlrl_ds.learners.scalar import ScalarStep
from comlrl_ds.learners.spans import busy
from comlrl_ds.preference.evaluation import Evaluation
from comlrl_ds.preference.pairs import Collected
from comlrl_ds.preference.prompts import PromptBuilder, named
from comlrl_ds.preference.records import PreferencePair
from comlrl_ds.rollout.base import SyncReport
from comlrl_ds.runs.display import Display
from comlrl_ds.runs.metrics import Metrics, agent_metric
from comlrl_ds.runs.run_dir import RunDir
from comlrl_ds.runs.trackers import Tracker

if TYPE_CHECKING:
    from torch import Tensor


class Reporter:
    """Counts updates and environment steps, and turns reports into metrics and lines.

    Args:
        args: the settings. run_dir: created already. display: where lines go. trackers: get the metrics, too; those of steps
            with a distance of `logging_steps` environment steps.
    """

    def __init__(self, args: MADPOConfig, run_dir: RunDir, display: Display, trackers: Sequence[Tracker] = ()) -> None:
        self._args, self._display = args, display
        self._metrics = Metrics(run_dir.metrics, trackers)
        self.updates = self.env_step = self.nonfinite_steps = 0
        self.evaluated_at = -1
        self._latest: dict[str, float] = {}  # metrics of steps and buffers since trackers last got some
        self._shown = 0
        self._learned = math.nan

    def counters(self) -> dict[str, int]:
        """What a resumed run goes on from; `metrics_bytes` is how much of metrics.jsonl belongs to it."""
        return {
            "updates": self.updates, "env_step": self.env_step, "nonfinite_steps": self.nonfinite_steps,
            "evaluated_at": self.evaluated_at, "metrics_bytes": self._metrics.size,
        }  # fmt: skip

    def restore(self, counters: Mapping[str, int] | None, *, cut: bool = True) -> None:
        """Back to earlier counters; None is the start of the run. Args: cut: later lines of the metrics are dropped."""
        counters = counters or {}
        self.updates, self.env_step = counters.get("updates", 0), counters.get("env_step", 0)
        self.nonfinite_steps, self.evaluated_at = counters.get("nonfinite_steps", 0), counters.get("evaluated_at", -1)
        if cut:
            self._metrics.cut(counters.get("metrics_bytes", 0))

    def log(self, values: Mapping[str, float]) -> None:
        """Metrics at the present update."""
        self._metrics.write(self.updates, self.env_step, values)
        self._metrics.track(self.env_step, values)

    def _log_step(self, values: Mapping[str, float]) -> None:
        """Metrics of a step, which trackers get with the next that shows."""
        self._metrics.write(self.updates, self.env_step, values)
        self._latest |= values

    def _track_steps(self) -> None:
        self._metrics.track(self.env_step, self._latest)
        self._latest = {}

    def collection_report(
        self, collected: Collected, builder: PromptBuilder, oracle_errors: int, seconds: float, rate: float
    ) -> dict[str, Any]:
        """What there is to say of a finished collection; `rate` in tokens per second of generation.

        Returns:
            {"values": metrics, "text": a line}, plain types.
        """
        values: dict[str, float] = {
            "collect/pairs": len(collected.pairs), "collect/pairs_without_gradient": collected.without_gradient,
            "collect/ties": collected.ties, "collect/invalid_scores": collected.invalid,
            "collect/oracle_errors": oracle_errors, "collect/reward_mean": collected.score_mean,
            "collect/empty_sides": sum(p.empty_sides for p in collected.pairs), "collect/dropped_prompts": len(builder.dropped),
            "collect/truncated_prompts": len(builder.truncated), "collect/control_tokens": builder.controls.total(),
            "collect/seconds": seconds, "rollout/tokens_per_s": rate,
        }  # fmt: skip
        for side in ("winner", "loser"):
            values |= {agent_metric(f"collect/{side}_tokens", i): n for i, n in enumerate(collected.lengths(side))}
        dropped = overlong_text(builder)
        if collected.without_gradient:
            dropped += f", {collected.without_gradient} pairs dropped that differ in no scored token"
        if builder.controls:
            texts = ", ".join(f"{text!r} {n} times" for text, n in builder.controls.most_common(3))
            dropped += f"; prompts write out control tokens, which are read as such: {texts}"
        text = (
            f"collected {len(collected.sampled)} tasks × {self._args.preference_num_candidates} candidates in {seconds:.0f} s"
            f" ({rate:.0f} tokens/s): {len(collected.pairs)} pairs, {collected.ties} ties, {collected.invalid} invalid scores,"
            f" mean score {collected.score_mean:.3f}{dropped}"
        )
        return {"values": {k: v if math.isfinite(v) else None for k, v in values.items()}, "text": text}

    def collected(self, report: Mapping[str, Any]) -> None:
        """Says what `collection_report` found."""
        self.log({k: math.nan if v is None else v for k, v in report["values"].items()})
        self._display.say(report["text"])

    def step(self, report: StepReport, batch: Sequence[PreferencePair]) -> None:
        """A finished step."""
        self.updates += 1
        previous = self.env_step
        if self._args.use_environment_step:
            self.env_step += self._args.environment_steps_per_pair * len(batch)
        reward = math.fsum(p.candidate_reward_mean for p in batch) / len(batch)
        values = {
            "train/loss": report.loss, "train/joint_margin": report.joint_margins.mean().item(),
            "train/accuracy": (report.joint_margins > 0).double().mean().item(), "train/step_s": report.seconds,
            "train/tokens_per_s": report.tokens / report.seconds, "train/micro_steps": report.micro_steps,
            "train/overlap": report.overlap,
            "turn_1/reward_mean": reward, "turn_1/expected_return": reward,
        }  # fmt: skip
        for i in range(self._args.num_actors):
            values |= {
                agent_metric("train/busy_s", i): busy(report.spans[i]),
                agent_metric("train/margin", i): report.margins[i].mean().item(),
                agent_metric("train/winner_logprob", i): report.winner_logprobs[i],
                agent_metric("train/loser_logprob", i): report.loser_logprobs[i],
                agent_metric("train/grad_norm", i): report.grad_norms[i],
                agent_metric("train/lr", i): report.learning_rates[i],
            }
        self.nonfinite_steps += report.skipped
        values["train/nonfinite_steps"] = self.nonfinite_steps
        self._log_step(values)
        # Without environment steps there is no distance to keep, so every step shows.
        every = self._args.logging_steps
        if not self._args.use_environment_step or previous // every != self.env_step // every:
            self._track_steps()
            self._display.say(
                f"update {self.updates}: loss {report.loss:.4f}, joint margin {values['train/joint_margin']:+.3f},"
                f" accuracy {values['train/accuracy']:.2f}, {report.seconds:.1f} s"
            )

    def buffer(self, learned: Tensor, gained: Sequence[Tensor], kl: tuple[Sequence[Tensor], float] | None) -> None:
        """A scored rollout buffer: learned rewards [tasks, G], each agent's advantages, and (each agent's KL, β)."""
        self.env_step += learned.numel()
        mean = float(learned.mean())
        values = {
            "turn_1/reward_mean": mean, "turn_1/expected_return": mean,
            "rl/reward_spread": float(learned.std(1, correction=0).mean()),
        }  # fmt: skip
        values |= {agent_metric("rl/advantage_abs", i): float(a.abs().mean()) for i, a in enumerate(gained)}
        if kl:
            mean_kl = float(sum(k.mean() for k in kl[0]) / len(kl[0]))
            values |= {"turn_1/reference_kl_mean": mean_kl, "turn_1/reference_kl_penalty_mean": kl[1] * mean_kl}
        self._log_step(values)
        self._learned = mean

    def policy_step(self, report: GradientReport) -> None:
        """A finished policy-gradient step."""
        self.updates += 1
        self.nonfinite_steps += report.skipped
        values = {
            "train/step_s": report.seconds, "train/tokens_per_s": report.tokens / report.seconds,
            "train/micro_steps": report.micro_steps, "train/overlap": report.overlap,
            "train/nonfinite_steps": self.nonfinite_steps,
        }  # fmt: skip
        for i in range(self._args.num_actors):
            values |= {
                agent_metric("rl/loss", i): report.losses[i], agent_metric("rl/logprob", i): report.logprobs[i],
                agent_metric("train/grad_norm", i): report.grad_norms[i],
                agent_metric("train/lr", i): report.learning_rates[i],
                agent_metric("train/busy_s", i): busy(report.spans[i]), agent_metric("rl/logprob_gap", i): report.gaps[i],
            }  # fmt: skip
        for i, (loss, mean) in enumerate(zip(report.value_losses, report.values)):
            values |= {agent_metric("value/loss", i): loss, agent_metric("value/mean", i): mean}
        self._log_step(values)
        if self.env_step - self._shown >= self._args.logging_steps or not self._shown:
            self._shown = self.env_step
            self._track_steps()
            self._display.say(f"update {self.updates}: learned reward {self._learned:.3f}, {report.seconds:.1f} s")

    def critic_steps(self, steps: Sequence[ScalarStep], cut_texts: int, counted: bool) -> None:
        """Finished steps of the critics, one each, and texts that were cut for them so far.

        Args:
            counted: the actors' step with it was skipped, too, and is counted.
        """
        values: dict[str, float] = {"value/cut_texts": cut_texts}
        for k, step in enumerate(steps):
            values |= {
                agent_metric("value/loss", k): step.loss,
                agent_metric("value/mean", k): math.fsum(step.values) / len(step.values),
                agent_metric("value/grad_norm", k): step.grad_norm,
            }  # fmt: skip
        self.nonfinite_steps += not counted and any(step.skipped for step in steps)
        self._log_step(values | {"train/nonfinite_steps": self.nonfinite_steps})

    def say(self, text: str) -> None:
        self._display.say(text)

    def nonfinite(self, report: StepReport, batch: Sequence[PreferencePair], numbers: Sequence[int], file: Path) -> str:
        """Says which agent, pair and file a skipped step comes from."""
        assert report.culprit
        agent, pair = report.culprit
        listed = numbers if pair is None else [numbers[pair]]
        tasks = sorted({p.item for p in batch} if pair is None else {batch[pair].item})
        what = "gradient" if pair is None else "log-probability"
        message = (
            f"update {self.updates} skipped on every agent: non-finite {what} of agent {agent},"
            f" pair {', '.join(map(str, listed))} of {file} (task {', '.join(map(str, tasks))})"
        )
        self._display.say(message)
        return message

    def evaluation(self, name: str, evaluation: Evaluation, values: Mapping[str, float]) -> None:
        """A finished evaluation."""
        self.log(values)
        self._display.say(
            f"evaluation {name}: mean reward {evaluation.mean:.3f} ± {evaluation.standard_error:.3f}"
            f" over {len(evaluation.items)} tasks, {values['eval/seconds']:.0f} s"
        )

    def syncs(self, reports: list[SyncReport]) -> None:
        """Weight syncs since the last call."""
        for report in reports:
            self.log({"rollout/sync_s": report.seconds, "rollout/sync_bytes": report.bytes})
        reports.clear()

    def close(self) -> None:
        """Ends the trackers, which start again with the next metrics."""
        if self._latest:
            self._track_steps()
        self._metrics.close()


def overlong_text(builder: PromptBuilder) -> str:
    """What became of over-long prompts in the last `build`, for a line; empty where there was none."""
    found = ""
    if builder.dropped:
        count = "1 task" if len(builder.dropped) == 1 else f"{len(builder.dropped)} tasks"
        found += f", {count} dropped because a prompt is too long ({named(builder.dropped)})"
    if builder.truncated:
        count = "1 prompt" if len(builder.truncated) == 1 else f"{len(builder.truncated)} prompts"
        found += f", {count} cut on the left to the longest length ({named(builder.truncated)})"
    return found
