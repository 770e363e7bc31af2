"""The command line: comlrl-ds train | plan | evaluate | export | demo-model.

Exit codes: 0 done (also when there was nothing to learn from), 1 the run failed, 2 something that the user wrote is wrong.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from comlrl_ds import __version__
from comlrl_ds.cluster import Cluster, join
from comlrl_ds.cluster.watch import ClusterFailure
from comlrl_ds.config.environment import TRACEBACK, switched_on
from comlrl_ds.config.errors import ConfigError, Problem
from comlrl_ds.runs.failure import failure_line, write_traceback


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point of `comlrl-ds` and of `python -m comlrl_ds`."""
    # The deepspeed launcher puts --local_rank=N wherever it likes; the environment says the same.
    words = [w for w in (sys.argv[1:] if argv is None else argv) if not re.fullmatch(r"--local[_-]rank=\d+", w)]
    options = _parser().parse_args(words)
    _calm_threads()
    cluster: Cluster | None = None
    try:
        if options.run in (_train, _evaluate):
            cluster = join()
            if not cluster.is_main:
                while cluster.serve()[0] != "leave":
                    pass
                return 0
        options.run(options)
        if cluster:
            cluster.dismiss()
    except ConfigError as error:
        return _ended(cluster, error, 2)
    except KeyboardInterrupt as error:
        return _ended(cluster, error, 130)
    except Exception as error:  # whatever it is, the user gets one line, and the traceback in a file
        return _ended(cluster, error, 1)
    return 0


def _ended(cluster: Cluster | None, error: BaseException, code: int) -> int:
    """Says why the program ends, unless another rank's end, which is said already, is why; the other ranks end, too."""
    try:
        if cluster:
            cluster.fail(error, code)
    except ClusterFailure as death:
        return death.code
    if isinstance(error, ClusterFailure):
        if not error.printed:
            print(f"comlrl-ds: {error}", file=sys.stderr)
        return error.code
    try:
        shows_traceback = switched_on(TRACEBACK)
    except ConfigError as wrong_switch:
        print(f"comlrl-ds: {wrong_switch}", file=sys.stderr)
        shows_traceback = False
    if shows_traceback:
        traceback.print_exc()
    if isinstance(error, KeyboardInterrupt) and cluster and not cluster.is_main:
        return code  # a terminal interrupts all ranks; the main one says so
    if isinstance(error, ConfigError):
        count = len(error.problems)
        print(f"comlrl-ds: {count} problem{'s' * (count > 1)}", file=sys.stderr)
        for problem in error.problems:
            print(f"  {problem}", file=sys.stderr)
    elif isinstance(error, KeyboardInterrupt):
        print("comlrl-ds: interrupted", file=sys.stderr)
    else:
        file = write_traceback(error, cluster.run_dir if cluster else None)
        seen = f"; the traceback is in {file}" if file else f"; set {TRACEBACK}=1 for the traceback"
        print(f"comlrl-ds: {failure_line(error)}{seen}", file=sys.stderr)
    return code


def _calm_threads() -> None:
    """Before torch is imported: OpenMP threads that wait must not spin, since trainer and engines share the cores."""
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    if "OMP_NUM_THREADS" not in os.environ and hasattr(os, "sched_getaffinity"):
        # Ranks on this machine, as the launcher says: deepspeed, mpirun, srun.
        names = ("LOCAL_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE", "SLURM_NTASKS_PER_NODE")
        counts = [os.environ[n] for n in names if os.environ.get(n, "").isdigit()]
        here = int(counts[0]) if counts and "MASTER_ADDR" in os.environ else 1
        os.environ["OMP_NUM_THREADS"] = str(max(1, len(os.sched_getaffinity(0)) // here))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="comlrl-ds", description="Train teams of LLM agents from preferences between their joint responses."
    )
    parser.add_argument("--version", action="version", version=__version__)
    commands = parser.add_subparsers(required=True, metavar="command")

    def command(name: str, run: Any, text: str) -> argparse.ArgumentParser:
        sub = commands.add_parser(name, help=text, description=text)
        sub.set_defaults(run=run)
        return sub

    overrides = {"nargs": "*", "metavar": "path.to.setting=value", "help": "settings that differ from the file"}
    train = command("train", _train, "train as a run file says")
    train.add_argument("run_file", type=Path)
    train.add_argument("overrides", **overrides)  # type: ignore[arg-type]
    train.add_argument(
        "--resume", default="auto", metavar="auto|never|DIR",
        help="auto: go on with the run in run.dir, if there is one; DIR: from this checkpoint of it",
    )  # fmt: skip
    plan = command("plan", _plan, "check a run file, show who would sit where and what it would cost; loads nothing")
    plan.add_argument("run_file", type=Path)
    plan.add_argument("overrides", **overrides)  # type: ignore[arg-type]
    plan.add_argument("--hostfile", type=Path, help="the machines of the launch, as deepspeed is given them")
    plan.add_argument("--devices", metavar="4x80GB", help="GPUs of the launch, or of each machine; default: this machine's")
    plan.add_argument("--prompts", action="store_true", help="also load the tokenizers and build the first prompts")
    evaluate = command("evaluate", _evaluate, "task reward of trained agents on the run file's held-out tasks")
    evaluate.add_argument("run_file", type=Path)
    evaluate.add_argument("overrides", **overrides)  # type: ignore[arg-type]
    evaluate.add_argument("--policy", type=Path, required=True, metavar="DIR", help="folder with agent_0, agent_1 …")
    export = command("export", _export, "write one agent's policy of a run, its end's or a checkpoint's, as a model folder")
    export.add_argument("run_dir", type=Path, metavar="RUN", help="the run's folder, its run.dir")
    export.add_argument("--agent", type=int, required=True, metavar="i", help="which, from 0")
    export.add_argument(
        "--merge", action="store_true", help="with LoRA: the base with the adapter in it, not the adapter alone"
    )
    export.add_argument(
        "--checkpoint", metavar="FOLDER", help="take this one; default: the end's policy, else the newest checkpoint's"
    )
    export.add_argument("--out", type=Path, metavar="FOLDER", help="default: RUN/export/agent_i, agent_i_merged with --merge")
    export.add_argument(
        "--dtype",
        choices=("bfloat16", "float16", "float32"),
        help="type of the written weights; default: the run's compute type",
    )
    demo = command("demo-model", _demo_model, "write SmolLM2-135M-Instruct as a Hugging Face folder")
    demo.add_argument("folder", type=Path)
    return parser


def _build(
    options: argparse.Namespace, agents: Sequence[str] | None = None, verbose: bool = True, resume: str = "never"
) -> Any:
    from comlrl_ds.config.run_file import load_run_file

    run_file = load_run_file(options.run_file, options.overrides)
    from comlrl_ds.trainers.from_file import build_trainer  # imports torch: seconds that a broken file does not wait for

    return build_trainer(run_file, options.run_file, agents=agents, verbose=verbose, resume=resume)


def _train(options: argparse.Namespace) -> None:
    with _build(options, resume=options.resume) as trainer:
        trainer.train()


def _plan(options: argparse.Namespace) -> None:
    from rich.console import Console
    from rich.table import Table

    from comlrl_ds.config.errors import Findings
    from comlrl_ds.config.run_file import load_run_file
    from comlrl_ds.planning.plan import plan_run
    from comlrl_ds.planning.task_check import check_task
    from comlrl_ds.runs.run_dir import RunDir

    run_file, found = load_run_file(options.run_file, options.overrides), Findings()
    base = options.run_file.resolve().parent
    plan = found.of(lambda: plan_run(run_file, base, hostfile=options.hostfile, devices=options.devices))
    shown = found.of(lambda: check_task(run_file, base))
    if run_file.run.dir is not None:
        found.of(RunDir(run_file.run.dir, resume=True).check)  # `train` goes on with a run by default
    found.raise_any()
    if options.prompts:
        _build(options, verbose=False)
    assert plan and shown
    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = 120
    table = Table(title=f"{options.run_file}: no problems", show_header=False)
    for name, value in shown.items():
        table.add_row(name, value)
    console.print(table)
    plan.render(console)


def _evaluate(options: argparse.Namespace) -> None:
    folders = sorted(options.policy.glob("agent_*"), key=lambda f: int(f.name.removeprefix("agent_")))
    if not folders:
        raise ConfigError(
            Problem("--policy", f"{str(options.policy)!r} has no agent_0, agent_1 …; give a folder such as runs/NAME/final")
        )
    with _build(options, [str(f) for f in folders]) as trainer:
        if trainer.eval_dataset is None:
            raise ConfigError(Problem("task.eval_dataset", "required to evaluate"))
        trainer.train_dataset = None  # nothing is trained, so no actor is loaded
        trainer.evaluate()
        trainer.display.reward_table([(str(options.policy), trainer.last_evaluation)])


def _export(options: argparse.Namespace) -> None:
    from comlrl_ds.trainers.export import export_policy

    export_policy(
        options.run_dir, options.agent, merge=options.merge, checkpoint=options.checkpoint, out=options.out, dtype=options.dtype
    )


def _demo_model(options: argparse.Namespace) -> None:
    from comlrl_ds.tasks.demo_model import write_demo_model

    print(f"the demo model is in {write_demo_model(options.folder)}")
