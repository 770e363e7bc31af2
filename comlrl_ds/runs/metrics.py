"""Metrics: each declared once, with unit and meaning; written to `metrics.jsonl` line by line."""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from comlrl_ds.runs.failure import writing
from comlrl_ds.runs.trackers import Tracker

# name (i stands for an agent's index) → (unit, meaning)
METRICS: dict[str, tuple[str, str]] = {
    "train/loss": ("nats", "MADPO loss of the step, mean over pairs"),
    "train/joint_margin": ("nats", "mean joint margin Δ, before the step"),
    "train/accuracy": ("share", "pairs of the batch with Δ > 0, before the step"),
    "train/margin/agent_i": ("nats", "mean margin of the agent"),
    "train/winner_logprob/agent_i": ("nats", "mean log-prob of winning completions"),
    "train/loser_logprob/agent_i": ("nats", "mean log-prob of losing completions"),
    "train/grad_norm/agent_i": ("1", "gradient norm before clipping"),
    "train/lr/agent_i": ("1", "learning rate of the step"),
    "train/tokens_per_s": ("tokens/s", "padded tokens through forward and backward, all agents"),
    "train/step_s": ("s", "wall time of the step"),
    "train/busy_s/agent_i": ("s", "time in which the agent's ranks were at work in the step"),
    "train/overlap": ("share", "of the least busy agent's time, in which all agents were at work; 0 where they take turns"),
    "train/micro_steps": ("count", "micro-steps of the step"),
    "train/nonfinite_steps": ("count", "steps skipped so far for a non-finite loss or gradient"),
    "turn_1/reward_mean": ("reward", "mean candidate_reward_mean of the batch's pairs"),
    "turn_1/expected_return": ("reward", "equals turn_1/reward_mean at one turn"),
    "collect/pairs": ("count", "pairs kept for training"),
    "collect/ties": ("count", "candidate pairs of equal score"),
    "collect/invalid_scores": ("count", "NaN or infinite oracle scores"),
    "collect/oracle_errors": ("count", "oracle calls that raised and were counted as invalid"),
    "collect/empty_sides": ("count", "completions in pairs with nothing to score by default: at most one token"),
    "collect/reward_mean": ("reward", "mean score of all candidates"),
    "collect/dropped_prompts": ("count", "tasks left out for an over-long prompt"),
    "collect/truncated_prompts": ("count", "over-long prompts cut on the left"),
    "collect/winner_tokens/agent_i": ("tokens", "mean length of winning completions"),
    "collect/loser_tokens/agent_i": ("tokens", "mean length of losing completions"),
    "collect/pairs_without_gradient": ("count", "selected pairs dropped because winner and loser differ in nothing scored"),
    "collect/control_tokens": ("count", "control tokens that tasks and formatters wrote out in prompts"),
    "collect/seconds": ("s", "wall time of the collection"),
    "rollout/tokens_per_s": ("tokens/s", "sampled tokens of all engines per second of generation"),
    "rollout/sync_s": ("s", "time of the last weight sync"),
    "rollout/sync_bytes": ("bytes", "size of the last weight sync"),
    "rollout/logprob_gap": ("nats", "mean |trainer − engine| per token on a few training rows"),
    "turn_1/reference_kl_mean": ("nats", "mean over agents of the k3 estimate of the KL to the first policies, per completion"),
    "turn_1/reference_kl_penalty_mean": ("reward", "reference_kl_coef times that"),
    "rl/reward_spread": ("reward", "mean over tasks of the deviation of learned rewards"),
    "rl/advantage_abs/agent_i": ("reward", "mean |advantage|"),
    "rl/loss/agent_i": ("reward·nats", "mean −A · log π of the step"),
    "rl/logprob/agent_i": ("nats", "mean log-prob of the step's completions, before it"),
    "rl/logprob_gap/agent_i": ("nats", "mean |trainer − engine| per token of the step; grows with later steps on a buffer"),
    "value/loss/agent_i": (
        "reward²",
        "value_loss_coef · mean (target − V)² before the step; maac's one critic is agent_0",
    ),
    "value/mean/agent_i": ("reward", "mean value of the step's responses, before it"),
    "value/cut_texts": ("1", "texts of a central critic that were cut so far, each time that they were read"),
    "value/grad_norm/agent_i": ("1", "gradient norm of the critic before clipping"),
    "reward/loss": ("nats", "Bradley–Terry loss in the last pass of the fit, each pair before its step"),
    "reward/first_loss": ("nats", "mean loss of the first ten steps"),
    "reward/accuracy": ("share", "pairs whose winner scores higher, in the last pass of the fit, each before its step"),
    **{
        f"reward/{of}accuracy_{size}_gap": ("share", f"the same of the third of them whose task rewards differ {how}")
        for of in ("", "eval_")
        for size, how in (("small", "least"), ("middle", "neither most nor least"), ("large", "most"))
    },
    "reward/margin": ("reward", "mean R_w − R_l, likewise"),
    "reward/pairs": ("count", "fitted pairs"),
    "reward/eval_loss": ("nats", "the loss on pairs of held-out tasks, after the fit"),
    "reward/eval_accuracy": ("share", "the accuracy on pairs of held-out tasks"),
    "reward/eval_margin": ("reward", "the margin on pairs of held-out tasks"),
    "reward/eval_pairs": ("count", "pairs of held-out tasks"),
    "reward/steps": ("count", "steps of the fit"),
    "reward/cut_texts": ("count", "joint texts cut to reward_max_length so far"),
    "reward/cut_responses": ("count", "of them those whose responses were cut"),
    "reward/seconds": ("s", "wall time of the fit"),
    "iter/current_iteration": ("count", "the round, from 1"),
    "iter/current_preference_pairs": ("count", "pairs of the round"),
    "iter/total_preference_pairs": ("count", "pairs of all rounds so far"),
    "iter/train_preference_pairs": ("count", "pairs that the round trains on"),
    "iter/retokenized_pairs": ("count", "of them those whose ids, read back from text, differ from the sampled ones"),
    "iter/replay_share/round_i": ("share", "of the round's training pairs that come from round i"),
    "iter/compared": ("count", "comparisons with two finite scores"),
    "iter/missing": ("count", "comparisons without an answer of one side"),
    "iter/win_rate": ("share", "of the comparisons that the agents won; ties count half"),
    "iter/tie_share": ("share", "of the comparisons of equal score"),
    "iter/target_reward_mean": ("reward", "mean score of the agents' candidates"),
    "iter/comparator_reward_mean": ("reward", "mean score of the comparator's candidates"),
    "iter/parse_failures": ("count", "joint answers of the comparator without any role's section"),
    "iter/comparator_dropped_prompts": ("count", "tasks left out because the comparator's prompt is too long for it"),
    "iter/comparator_truncated_prompts": ("count", "too long prompts of the comparator cut on the left"),
    "iter/comparator_cut": ("count", "answers of the comparator cut to max_new_tokens of the agents, in the agents' tokens"),
    "iter/comparator_unfinished": ("count", "answers of the comparator that a limit of its writer or server ended"),
    "iter/api_requests": ("count", "HTTP requests that ended"),
    "iter/api_retries": ("count", "of them those that asked again"),
    "iter/api_failures": ("count", "requests given up"),
    "iter/api_answers": ("count", "answers that came"),
    "iter/api_known": ("count", "answers taken from the journal"),
    "iter/weights/agent_i": ("hash", "which weights sampled the agents' side; equal numbers are equal weights"),
    "iter/comparator_weights/agent_i": ("hash", "which weights sampled the comparator's side"),
    "iter/drift/agent_i": ("ratio", "‖θ − θ₀‖ / ‖θ₀‖ after the round, θ₀ the start policy"),
    "iter/win_rate_over_initial": ("share", "of the held-out tasks with a higher reward than the start policy's"),
    **{
        f"iter/{prefix}/{name}": (unit, meaning)
        for prefix, which in (("reward_distribution", "all candidates"), ("selected_reward_distribution", "the round's pairs"))
        for name, unit, meaning in (
            ("current_iteration", "count", "the round, from 1"),
            ("pair_count", "count", "pairs of the round"),
            ("target_sample_count", "count", f"finite raw rewards of the agents, {which}"),
            ("comparator_sample_count", "count", f"finite raw rewards of the comparator, {which}"),
            ("target_mean", "reward", f"mean raw reward of the agents, {which}"),
            ("comparator_mean", "reward", f"mean raw reward of the comparator, {which}"),
        )
    },
    "eval/turn_1/reward_mean": ("reward", "mean task reward of the current policies"),
    "eval/turn_1/expected_return": ("reward", "equals eval/turn_1/reward_mean at one turn"),
    "eval/standard_error": ("reward", "standard error of the mean over tasks"),
    "eval/n": ("count", "tasks evaluated"),
    "eval/dropped_prompts": ("count", "tasks left out because a prompt is too long"),
    "eval/truncated_prompts": ("count", "too long prompts cut on the left"),
    "eval/seconds": ("s", "wall time of the evaluation"),
}


def agent_metric(name: str, agent: int) -> str:
    """The metric `name`/agent_i of one agent."""
    return f"{name}/agent_{agent}"


_OF_EVERY_LINE = ("update", "env_step", "time")


def is_ours(name: str) -> bool:
    """Whether a name is a declared metric's, or one that every line has."""
    parent, _, last = name.rpartition("/")
    word, _, number = last.rpartition("_")
    generic = f"{parent}/{word}_i" if word in ("agent", "round") and number.isdigit() else name
    return generic in METRICS or name in _OF_EVERY_LINE


def _may_be_the_users(name: str) -> bool:
    """Whether an eval_aggregator or a metrics_callback may have given a metric this name."""
    return name.startswith(("eval/", "rl/callback/")) and not name.endswith("/")


class Metrics:
    """Appends one JSON object per call: {"update", "env_step", "time", …metrics}. Unknown names are refused, but the user's own
    under eval/.
    """

    def __init__(self, file: Path | None, trackers: Sequence[Tracker] = ()) -> None:
        self._file = file
        self._trackers = trackers

    @property
    def size(self) -> int:
        """Bytes written."""
        return self._file.stat().st_size if self._file is not None and self._file.exists() else 0

    def cut(self, size: int) -> None:
        """Drops what was written after the first `size` bytes."""
        if self._file is not None and self._file.exists():
            os.truncate(self._file, size)

    def write(self, update: int, env_step: int, values: Mapping[str, float]) -> None:
        """Values are finite numbers, or NaN and infinity, which are written as null."""
        unknown = [n for n in values if n in _OF_EVERY_LINE or not (is_ours(n) or _may_be_the_users(n))]
        if unknown:
            raise KeyError(f"undeclared metric {unknown[0]!r}; declare it in comlrl_ds/runs/metrics.py")
        if self._file is not None:
            clean = {k: v if math.isfinite(v) else None for k, v in values.items()}
            line = {"update": update, "env_step": env_step, "time": round(time.time(), 3), **clean}
            with writing(self._file), open(self._file, "a", encoding="utf-8") as f:
                f.write(json.dumps(line, allow_nan=False) + "\n")

    def track(self, env_step: int, values: Mapping[str, float]) -> None:
        """Hands values to the trackers of `report_to`."""
        for tracker in self._trackers:
            tracker.track(env_step, values)

    def close(self) -> None:
        for tracker in self._trackers:
            tracker.close()


def last_counters(file: Path) -> dict[str, int]:
    """Updates and environment steps of the last line of a file of metrics, and its size in bytes; empty without a line."""
    lines = file.read_bytes().splitlines() if file.exists() else []
    if not lines:
        return {}
    last = json.loads(lines[-1])
    return {"updates": int(last["update"]), "env_step": int(last["env_step"]), "metrics_bytes": file.stat().st_size}
