"""From a run file to a trainer."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from comlrl_ds.config.lora import LoraSettings
from comlrl_ds.config.references import beside
from comlrl_ds.config.run_file import RunFile
from comlrl_ds.config.task import load_task


def build_trainer(
    run_file: RunFile, file: Path, *, agents: Sequence[str] | None = None, verbose: bool = True, resume: str = "never"
) -> Any:
    """The trainer that a run file describes, checked, with nothing loaded.

    Args:
        agents: other model sources in place of the file's, e.g. trained ones.
        resume: "never", "auto", or a checkpoint's folder.
    """
    from comlrl_ds.engines.ds_config import read_deepspeed
    from comlrl_ds.trainers import preference

    base = file.resolve().parent
    task = load_task(run_file.task, base)
    kinds = (preference.MADPOTrainer, preference.MADPOIterTrainer, preference.MARLHFTrainer, preference.MARLHFIterTrainer)
    trainer: Any = next(kind for kind in kinds if kind.kind == run_file.trainer)
    args = run_file.trainer_config
    for name in ("comparator_model_name", "comparator_agents", "reward_model_name", "critic_model_name"):  # as agents' models
        value = getattr(args, name, None)
        if value is not None:
            found = beside(value, base) if isinstance(value, str) else [beside(v, base) for v in value]
            args = args.model_copy(update={name: found})
    for name in ("reward_lora", "critic_lora"):
        if (own := getattr(args, name, None)) is not None:
            args = args.model_copy(update={name: _lora_beside(own, base)})
    return trainer(
        agents=list(agents) if agents else [beside(a.model, base) for a in run_file.agents],
        model_config={"dtype": run_file.dtype, "attn_implementation": run_file.attn_implementation},
        train_dataset=task.train, eval_dataset=task.held_out, reward_func=task.reward_func,
        reward_processor=task.reward_processor, formatters=task.formatters, args=args,
        rollout=run_file.rollout, deepspeed=read_deepspeed(run_file.deepspeed, base), placement=run_file.placement_from(base),
        run_dir=run_file.run.dir, seed=run_file.run.seed, report_to=run_file.run.report_to, wandb_config=run_file.run.wandb,
        stall_timeout_s=run_file.run.stall_timeout_s, checkpoint_interval=run_file.run.checkpoint_interval,
        checkpoint_every_updates=run_file.run.checkpoint_every_updates,
        checkpoint_total_limit=run_file.run.checkpoint_total_limit, resume=resume, verbose=verbose,
        centralized_comparator_adapter=task.adapter, num_agents=args.num_agents,
        lora=None if agents else [_lora_beside(a.lora, base) for a in run_file.agents],
    )  # fmt: skip


def _lora_beside(lora: LoraSettings | None, base: Path) -> LoraSettings | None:
    """With the adapter to start from found as models are."""
    if lora is None or lora.adapter is None:
        return lora
    return lora.model_copy(update={"adapter": beside(lora.adapter, base)})
