"""Settings of the replay buffer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from comlrl_ds.config.errors import ConfigError, Findings, Problem, nearest

REPLAY_MODES = ("current", "nearest_k", "all_history", "lambda_decay")
REPLAY_ALIASES = {
    "latest": "current", "new": "current",
    "recent_k": "nearest_k", "last_k": "nearest_k", "k": "nearest_k",
    "lambda": "lambda_decay", "td_lambda": "lambda_decay", "td-lambda": "lambda_decay",
}  # fmt: skip

MODE, K, LAMBDA, SAMPLE_SIZE = (f"preference_replay_{name}" for name in ("mode", "k", "lambda", "sample_size"))


@dataclass(frozen=True)
class ReplaySettings:
    """The page's `preference_replay_*` settings.

    Args:
        mode: "current", all pairs of the round itself; else draws from "nearest_k", the k newest rounds, "all_history",
            every round, both with equal weight, or "lambda_decay", every round weighted by age. Aliases are taken.
        k: rounds of nearest_k, at least 1; the mode current takes 1.
        decay: λ of lambda_decay, in [0, 1].
        sample_size: draws of a historical mode; None: as many as the round has pairs, or the newest round that has any.

    Raises:
        ConfigError: a setting that the mode does not take, or lacks; all of them, under the page's names.
    """

    mode: str = "current"
    k: int | None = None
    decay: float | None = None
    sample_size: int | None = None

    def __post_init__(self) -> None:
        found = Findings()
        mode = self.mode.strip().lower() if isinstance(self.mode, str) else self.mode
        mode = REPLAY_ALIASES.get(mode, mode) if isinstance(mode, str) else mode
        if mode not in REPLAY_MODES:
            raise ConfigError(Problem(MODE, f"{self.mode!r} is not a replay mode{nearest(str(mode), REPLAY_MODES)}"))
        object.__setattr__(self, "mode", mode)
        _check_k(found, mode, self.k)
        _check_decay(found, mode, self.decay)
        if self.sample_size is not None and mode == "current":
            found.add(SAMPLE_SIZE, f"mode 'current' trains on every pair of the round; drop it, or give another {MODE}")
        elif self.sample_size is not None and not _whole(self.sample_size):
            found.add(SAMPLE_SIZE, f"{self.sample_size!r} is not a whole number of at least 1")
        found.raise_any()


def _whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def _check_k(found: Findings, mode: str, k: Any) -> None:
    if mode == "nearest_k":
        if k is None:
            found.add(K, "mode 'nearest_k' needs it: how many of the latest rounds to draw from")
        elif not _whole(k):
            found.add(K, f"{k!r} is not a whole number of at least 1")
    elif mode == "current":
        if k is not None and not (_whole(k) and k == 1):
            found.add(K, f"mode 'current' takes no k but 1, got {k!r}; for {k!r} rounds write {MODE}: nearest_k")
    elif k is not None:
        found.add(K, f"mode {mode!r} takes none; drop it, or write {MODE}: nearest_k")


def _check_decay(found: Findings, mode: str, decay: Any) -> None:
    if mode != "lambda_decay":
        if decay is not None:
            found.add(LAMBDA, f"mode {mode!r} takes none; drop it, or write {MODE}: lambda_decay")
    elif decay is None:
        found.add(LAMBDA, "mode 'lambda_decay' needs it: 0 keeps the newest round, 1 weights all alike")
    elif isinstance(decay, bool) or not isinstance(decay, int | float) or not 0 <= decay <= 1:
        found.add(LAMBDA, f"{decay!r} is not a number from 0 to 1")
