"""comlrl_ds on the command line, with each phase of a run marked by a file and slowed down, so that a test can meet it.

Environment: PHASES, the folder of the marks. Ranks note their process id, rank by rank.
"""

from __future__ import annotations

import functools
import os
import sys
import time
from pathlib import Path

from comlrl_ds.cli import main
from comlrl_ds.engines.engine import PolicyEngine
from comlrl_ds.rollout.engine_client import VLLMRollout
from comlrl_ds.rollout.outbox import Outbox

MARKS = Path(os.environ["PHASES"])


def slowed(owner, name: str, phase: str, seconds: float) -> None:
    real = getattr(owner, name)

    @functools.wraps(real)  # its name, too: calls travel by name
    def slow(self, *arguments, **keywords):
        (MARKS / phase).touch()
        time.sleep(seconds)
        return real(self, *arguments, **keywords)

    setattr(owner, name, slow)


if __name__ == "__main__":
    (MARKS / f"rank_{os.environ['RANK']}").write_text(str(os.getpid()))
    slowed(VLLMRollout, "receive", "collecting", 1.0)
    slowed(PolicyEngine, "score_pairs", "training", 1.0)
    slowed(Outbox, "fill", "syncing", 2.0)
    sys.exit(main())
