"""vLLM's plug-in hook (`vllm.general_plugins`): makes our weight-transfer back-end, and where they are wanted our operators,
known in every vLLM process.
"""

from __future__ import annotations

import os

SWITCH = "COMLRL_DS_GROUPED_LORA"


def register() -> None:
    """Registers the `host` back-end. vLLM calls this in each of its processes, possibly more than once."""
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    # The factory refuses a name twice, and offers no public question whether it knows one.
    if "host" not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine("host", "comlrl_ds.rollout.host_transfer", "HostWeightTransfer")
    if os.environ.get(SWITCH):
        from comlrl_ds.rollout.grouped_lora import install

        install()
