"""comlrl_ds on the command line, ended by SIGKILL at a chosen call: KILL_AT is "point:number", e.g. "collecting:5"."""

from __future__ import annotations

import functools
import os
import signal
import sys

from comlrl_ds.cli import main
from comlrl_ds.learners.madpo import MadpoLearner
from comlrl_ds.learners.policy_gradient import PolicyGradientLearner
from comlrl_ds.preference.journal import Journal
from comlrl_ds.runs.checkpoints import CheckpointStore

POINTS = {
    "collecting": (Journal, "append"), "updating": (MadpoLearner, "step"), "saving": (CheckpointStore, "seal"),
    "learning": (PolicyGradientLearner, "step"),
}  # fmt: skip


def kill_at(point: str, number: int) -> None:
    owner, name = POINTS[point]
    real = getattr(owner, name)
    calls = 0

    @functools.wraps(real)
    def counted(self, *arguments, **keywords):
        nonlocal calls
        calls += 1
        if calls == number:
            os.kill(os.getpid(), signal.SIGKILL)
        return real(self, *arguments, **keywords)

    setattr(owner, name, counted)


if __name__ == "__main__":
    if os.environ.get("KILL_AT") and os.environ.get("RANK", "0") == "0":
        where, _, count = os.environ["KILL_AT"].partition(":")
        kill_at(where, int(count))
    sys.exit(main())
