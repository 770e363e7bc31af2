"""One agent's policy out of a run's folder: a model in Hugging Face layout, or an adapter in PEFT's."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from comlrl_ds.config.errors import ConfigError, Problem
from comlrl_ds.config.lora import LoraSettings
from comlrl_ds.preference.teams import agent_name
from comlrl_ds.rollout.adapters import PEFT_PREFIX, WEIGHTS_FILE, is_adapter, merged, wire
from comlrl_ds.rollout.disk import mark_of, tensors_in_files, weight_files
from comlrl_ds.runs.checkpoints import Checkpoint, CheckpointError, CheckpointStore, read_checkpoint
from comlrl_ds.runs.files import sync
from comlrl_ds.runs.run_dir import RunDir
from comlrl_ds.trainers.model_folder import (
    OnDisk,
    check_loads,
    compare,
    in_dtype,
    layout_of,
    place_of,
    write_configs,
    write_weights,
)
from comlrl_ds.trainers.preference.session import actor_role

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from comlrl_ds.engines.masters import SavedPolicy


def export_policy(
    run: str | Path, agent: int, *, merge: bool = False, checkpoint: str | Path | None = None, out: str | Path | None = None,
    dtype: str | None = None, say: Callable[[str], None] = print,
) -> Path:  # fmt: skip
    """Writes the policy of one agent with its tokenizer: whole weights, or with LoRA a PEFT folder. No launcher is needed,
    whatever ranks and ZeRO stage a checkpoint is from. What was written is read again and compared, bit for bit.

    Args:
        run: folder of a run. agent: from 0.
        merge: the base with the adapter in it instead of the adapter; the adapter is rounded to the type that is written, and
            sums are made in fp32.
        checkpoint: a checkpoint's folder, or the name of one of the run's; None: what the run wrote at its end, else its
            newest checkpoint.
        out: where to; None: export/agent_<i> in the run's folder, with `_merged` behind it where that is done.
        dtype: of the files; None: what the run computes in.
        say: is told what is taken, and what was written.

    Returns:
        the written folder.

    Raises:
        ConfigError: no such run, agent or checkpoint, nothing to export, a damaged checkpoint, a base that is missing, or
            another than then, or a folder `out` that holds something.
    """
    import torch

    run_dir = RunDir(run)
    config = _config(run_dir)
    agents = config["agents"]
    if not 0 <= agent < len(agents):
        which = "only agent 0" if len(agents) == 1 else f"agents 0 to {len(agents) - 1}"
        raise ConfigError(Problem("--agent", f"{agent}, but the run in {str(run_dir.path)!r} has {which}"))
    section = agents[agent]
    if merge and section.get("lora") is None:
        raise ConfigError(Problem("--merge", f"agent {agent} has no adapter: its weights are whole; leave --merge out"))
    default = run_dir.path / "export" / (agent_name(agent) + ("_merged" if merge else ""))
    target = default if out is None else Path(out).expanduser().absolute()
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise ConfigError(Problem("--out", f"{str(target)!r} exists and is not empty; give another folder"))
    source = _source(run_dir, agent, checkpoint, say)
    if section.get("lora") is None:
        fill = _whole(section, agent, source)
    else:
        fill = _adapter(section, agent, source, merge, bool(config["args"]["disable_dropout"]))
    policy = source.policy
    written = dtype or policy.dtype
    numbers = getattr(torch, written)

    temporary = target.with_name(f".{target.name}.tmp")
    if temporary.exists():  # of an attempt that was cut off
        shutil.rmtree(temporary)
    temporary.mkdir(parents=True)
    try:
        count = fill(temporary, numbers)
        if policy.head:
            _write_head(policy.head, temporary, numbers)
        _write_tokenizer(run_dir, section, agent, temporary, say)
        for file in temporary.iterdir():
            sync(file)
        os.replace(temporary, target)
        sync(target.parent)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    kind = "adapter" if section.get("lora") is not None and not merge else "model"
    say(f"{target}: {kind} in {written}, {count} tensors, read again and equal")
    return target


# --- what is taken
@dataclass(frozen=True)
class _Source:
    """Where a policy is taken from: the folder, the policy, and the checkpoint, where it is one's."""

    folder: Path
    policy: SavedPolicy
    checkpoint: Checkpoint | None


def _config(run: RunDir) -> dict[str, Any]:
    """What a run wrote of its settings at its start."""
    file = run.path / "config.yaml"
    if not run.holds_run:
        what = "has no config.yaml; give the run.dir of a run" if run.path.is_dir() else "is no folder"
        raise ConfigError(Problem("", f"no such run: {str(run.path)!r} {what}"))
    try:
        content = yaml.safe_load(file.read_text())
        _ = [str(agent["model"]) for agent in content["agents"]], bool(content["args"]["disable_dropout"])
    except (yaml.YAMLError, UnicodeDecodeError, TypeError, KeyError) as error:
        what = f"{type(error).__name__}: {' '.join(str(error).split())}"
        raise ConfigError(Problem(str(file), f"is not what a run writes ({what})")) from None
    return content


def _source(run: RunDir, agent: int, wanted: str | Path | None, say: Callable[[str], None]) -> _Source:
    from safetensors import SafetensorError

    from comlrl_ds.engines.masters import read_policy

    final = run.final / agent_name(agent)
    if wanted is None and final.is_dir():
        try:
            policy = _final_policy(final)
        except (OSError, ValueError, KeyError, SafetensorError) as error:
            raise ConfigError(Problem(str(final), f"is damaged: {error}")) from None
        say(f"agent {agent} from {final}")
        newest = CheckpointStore(run.checkpoints).folders()[:1]
        if newest and newest[0].stat().st_mtime > final.stat().st_mtime:
            # A run of more rounds that was started again, and has not come to its end yet.
            say(f"note: {newest[0].name} was written later; --checkpoint {newest[0].name} takes that")
        return _Source(final, policy, None)
    try:
        if wanted is not None:
            named = Path(wanted).expanduser()
            inside = run.checkpoints / named
            found: Checkpoint | None = read_checkpoint(inside if inside.is_dir() and not named.is_dir() else named.absolute())
        else:
            found, skipped = CheckpointStore(run.checkpoints).newest()
            for line in skipped:
                say(f"skipped: {line}")
        if found is None:
            message = f"nothing to export: {str(run.path)!r} has neither {final.relative_to(run.path)} nor a whole checkpoint"
            raise ConfigError(Problem("", message))
        if actor_role(agent) not in found.state.get("roles", []):
            raise CheckpointError(f"{found.folder} holds no {actor_role(agent)}")
        policy = read_policy(found, actor_role(agent))
    except CheckpointError as error:
        raise ConfigError(Problem("--checkpoint" if wanted else "", str(error))) from None
    say(f"agent {agent} from {found.folder}")
    return _Source(found.folder, policy, found)


def _final_policy(folder: Path) -> SavedPolicy:
    """What a run wrote at its end."""
    from safetensors import safe_open
    from safetensors.torch import load_file

    from comlrl_ds.engines.heads import HEAD_FILE, VALUE_HEAD
    from comlrl_ds.engines.masters import SavedPolicy

    tensors: dict[str, Any] = {}
    for file in [folder / WEIGHTS_FILE] if is_adapter(folder) else weight_files(folder):
        opened: Any = safe_open(file, framework="pt")
        tensors |= {name.removeprefix(PEFT_PREFIX): OnDisk(opened, name) for name in opened.keys()}  # noqa: SIM118
    if not tensors:
        raise ValueError("it has no weights")
    dtype = str(next(iter(tensors.values())).contiguous().dtype).removeprefix("torch.")
    head = load_file(file) if (file := folder / VALUE_HEAD / HEAD_FILE).is_file() else {}
    return SavedPolicy(tensors, {}, head, dtype)


# --- what is written: functions that fill a folder and say how many tensors that was
Fill = Callable[[Path, "torch.dtype"], int]


def _base(section: Mapping[str, Any], agent: int) -> Path:
    from comlrl_ds.engines.loading import local_folder

    return Path(local_folder(str(section["model"]), f"agents.{agent}.model"))


def _whole(section: Mapping[str, Any], agent: int, source: _Source) -> Fill:
    # What a run wrote at its end is a whole folder; it needs no base to be written again.
    ended = source.checkpoint is None
    base = source.folder if ended and not Path(section["model"]).expanduser().is_dir() else _base(section, agent)
    layout, policy = layout_of(base), source.policy
    tensors = policy.tensors | {n: t for n, t in policy.buffers.items() if n in layout}
    places = {name: place_of(name, t.shape, layout, base) for name, t in tensors.items()}

    def fill(folder: Path, dtype: torch.dtype) -> int:
        ordered = sorted((layout[place].file, place, name) for name, place in places.items())
        count = write_weights(folder, layout, ((place, in_dtype(tensors[name], dtype)) for _, place, name in ordered))
        write_configs(source.folder if ended else base, folder, dtype)
        check_loads(folder)
        return count

    return fill


def _adapter(section: Mapping[str, Any], agent: int, source: _Source, merge: bool, dropout_off: bool) -> Fill:
    from comlrl_ds.engines.lora import mark_of_base

    base, ended = _base(section, agent), source.checkpoint is None
    marks = source.checkpoint.state.get("bases", {}) if source.checkpoint else {}
    mark = marks.get(actor_role(agent)) or (mark_of_base(source.folder) if ended else "")
    if mark and mark != mark_of(str(base)):
        message = f"{str(base)!r} has other weights than when {source.folder} was saved, whose adapter is for those"
        raise ConfigError(Problem(f"agents.{agent}.model", f"{message}; put the base of then there"))
    settings = LoraSettings(adapter=str(source.folder)) if ended else LoraSettings(**section["lora"])
    if settings.adapter and not is_adapter(settings.adapter):
        message = f"the agent's adapter started from {settings.adapter!r}, which is no PEFT folder any more"
        raise ConfigError(Problem(f"agents.{agent}.lora.adapter", message))
    config, layers = _empty_adapter(base, settings, dropout=not dropout_off)
    tensors = source.policy.tensors
    wanted = {f"{x.name}.lora_{part}.weight": tuple(p.shape) for x in layers for part, p in (("A", x.a), ("B", x.b))}
    found = {name: tuple(t.shape) for name, t in tensors.items()}
    if found != wanted:
        odd = min(n for n in found.keys() | wanted.keys() if found.get(n) != wanted.get(n))
        message = f"{odd} has shape {found.get(odd)}, and {wanted.get(odd)} by the run's settings and its base {str(base)!r}"
        raise ConfigError(Problem(str(source.folder), message))

    def fill(folder: Path, dtype: torch.dtype) -> int:
        from comlrl_ds.engines.lora import save_adapter

        adapter = {name: in_dtype(tensors[name], dtype) for name in wanted}
        if not merge:
            save_adapter(config, adapter, folder)
            compare(folder / WEIGHTS_FILE, {PEFT_PREFIX + name: t for name, t in adapter.items()})
            return len(adapter)
        layout = layout_of(base)
        sent: dict[str, Tensor] = {}
        for x in layers:
            a, b = (adapter[f"{x.name}.lora_{part}.weight"] for part in "AB")
            shape = (b.shape[0], a.shape[1])
            place = place_of(f"{x.name}.weight", shape[::-1] if x.transposed else shape, layout, base).removesuffix(".weight")
            sent |= dict(wire(place, a, b, x.scaling, x.transposed))
        count = write_weights(folder, layout, merged(str(base), sent, dtype, tensors_in_files(str(base))))
        write_configs(base, folder, dtype)
        check_loads(folder)
        return count

    return fill


def _empty_adapter(base: Path, settings: LoraSettings, *, dropout: bool) -> tuple[Any, list[Any]]:
    """(PEFT's configuration, the layers with an adapter) of the model that learned, without its weights."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from comlrl_ds.engines.lora import adapter_layers, add_lora

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(base))
        add_lora(model, settings, source=str(base), seed=0, dropout=dropout)
    return model.lora_config, adapter_layers(model, "")


def _write_head(head: Mapping[str, Any], folder: Path, dtype: torch.dtype) -> None:
    from comlrl_ds.engines.heads import HEAD_FILE, VALUE_HEAD, save_head

    meant = {name: in_dtype(t, dtype) for name, t in head.items()}
    save_head(meant, folder / VALUE_HEAD)
    compare(folder / VALUE_HEAD / HEAD_FILE, meant)


def _write_tokenizer(run: RunDir, section: Mapping[str, Any], agent: int, folder: Path, say: Callable[[str], None]) -> None:
    """The one that the run wrote beside its policies, which may be another than the base's; else the base's."""
    from comlrl_ds.engines.loading import load_tokenizer

    for place in (run.final / agent_name(agent), Path(section["model"]).expanduser()):
        if place.is_dir():
            with contextlib.suppress(ConfigError):
                load_tokenizer(str(place), "").save_pretrained(folder)
                return
    say(f"note: no tokenizer of agent {agent} is at hand; put its files beside the weights")
