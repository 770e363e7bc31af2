"""`comlrl-ds plan`: placement, weight edges and memory of a run file, without a GPU and without loading anything.

Nothing here imports torch: the answer is there in a second, on any machine.
"""

from __future__ import annotations

import os
import re
import shutil
import socket
import subprocess
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import psutil

from comlrl_ds.cluster.devices import FIELDS, base_of
from comlrl_ds.cluster.engine_places import edges
from comlrl_ds.cluster.hostfile import LOCAL, slots_of_hostfile, slots_of_one_host
from comlrl_ds.cluster.layout import EnginePlace, Layout, Slot
from comlrl_ds.cluster.placement import comparator_roles, deepspeed_of, resolve_placement, section_of
from comlrl_ds.config.errors import ConfigError, Findings, Problem
from comlrl_ds.config.madpo import DROPOUT_NOTE
from comlrl_ds.config.marlhf import MARLHFConfig
from comlrl_ds.config.model_files import model_folder
from comlrl_ds.config.placement import PlacementConfig
from comlrl_ds.config.run_file import RunFile
from comlrl_ds.engines.ds_config import EnginePlan, TrainerNumbers, plan_engine, read_deepspeed
from comlrl_ds.planning import estimate
from comlrl_ds.planning.estimate import Memory, Work
from comlrl_ds.planning.model_shapes import ModelShape, shape_of_model
from comlrl_ds.planning.role_models import agent_models, check_adapters, learning_of, model_of
from comlrl_ds.planning.tables import EdgeRow, GroupMemory, HostMemory, Plan, RoleRow
from comlrl_ds.rollout.adapter_room import adapter_room
from comlrl_ds.rollout.disk import shape_of
from comlrl_ds.rollout.start import engine_places
from comlrl_ds.rollout.vllm_models import check_head_size

# Roles of each trainer besides rollout; those of PER_AGENT exist once for each agent.
ROLES: dict[str, tuple[str, ...]] = {"madpo": ("actor",), "madpo_iter": ("actor",)}
ROLES |= {"marlhf": ("actor", "reward_model"), "marlhf_iter": ("actor", "reward_model")}
PER_AGENT = ("actor", "reference")
FROZEN = ("reference", "comparator")
# Of a launch that only the placement tells of; more is a slip of the pen.
MOST_RANKS = 1 << 16


@dataclass(frozen=True)
class Machine:
    """What a launch computes on; bytes are None where they are not known."""

    kind: str
    device_bytes: int | None
    host_bytes: Mapping[str, int]


def plan_run(run_file: RunFile, base: Path, *, hostfile: Path | None = None, devices: str | None = None) -> Plan:
    """What a run file would do.

    Args:
        base: folder of the run file.
        hostfile: the ranks, as the launcher will be given them.
        devices: "4x80GB": so many GPUs (of each host, with a hostfile) of so much memory; None: this machine's.

    Raises:
        ConfigError: with every problem of the placement and of the DeepSpeed files.
    """
    found, args, team = Findings(), run_file.trainer_config, len(run_file.agents)
    others = comparator_roles(run_file.placement, getattr(args, "comparator_devices", None), team)
    slots = found.of(partial(_slots, run_file.placement, hostfile, devices))
    machine = found.of(partial(_machine, slots or [], hostfile is not None, devices))
    roles = needed_roles(run_file.trainer, team)
    agents = agent_models(run_file, base)
    has_lora = any(lora for _, lora in agents)
    if isinstance(args, MARLHFConfig):
        full = [i for i, (_, lora) in enumerate(agents) if lora is None]
        roles += [f"reference.{i}" for i in full] if args.reference_kl_enabled else []
        roles += args.critic_roles
    found.of(partial(check_adapters, roles, run_file, base))
    whole_weights = has_lora and run_file.rollout.transport in ("nccl", "ipc")
    if whole_weights:
        found.add("rollout.transport", f"{run_file.rollout.transport!r} sends whole weights, and an agent has lora; write auto")
    layout = None
    # Without ranks or devices every role would be wrong, and none by the user's mistake.
    if slots and machine:
        fields = {name: getattr(args, name) for name in FIELDS if hasattr(args, name)}
        resolve = partial(resolve_placement, run_file.placement, slots, agents=team, roles=[*roles, *others], devices=fields)
        layout = found.of(partial(resolve, device_kind=machine.kind))
    if machine:
        folders = [model_folder(source) for source, _ in agents]
        here = [str(folder) for folder in folders if folder]
        for i, folder in enumerate(folders):
            if folder:
                found.of(partial(check_head_size, run_file.rollout, machine.kind, str(folder), f"agents.{i}.model"))
        if has_lora and len(here) == team:
            loras = [lora for _, lora in agents]
            found.of(partial(adapter_room, run_file.rollout, machine.kind, here, loras, comparators=False))
    engines: list[EnginePlace] | None = None
    if layout and machine and not whole_weights:
        sources = [source for source, _ in agents]
        swaps = has_lora or getattr(args, "comparator_policy", "current") in ("history", "model")
        engines = found.of(partial(engine_places, run_file.rollout, layout, sources, machine.kind, swaps=swaps))
    plans: dict[str, EnginePlan] = {}
    for role in roles:
        size = len(layout.ranks_of(role)) if layout else _written_size(run_file.placement, role)
        plan = found.of(partial(_engine_plan, run_file, base, role, size, _best_dtype(machine.kind if machine else "cpu")))
        plans |= {role: plan} if plan else {}
    found.problems = list(dict.fromkeys(found.problems))
    found.raise_any()
    assert layout and machine and engines is not None
    return make_plan(run_file, base, layout, engines, plans, machine)


def needed_roles(trainer: str, agents: int) -> list[str]:
    """Names of every role of a trainer but rollout."""
    return [r for base in ROLES[trainer] for r in ([f"{base}.{i}" for i in range(agents)] if base in PER_AGENT else [base])]


def parse_devices(text: str) -> tuple[int, int]:
    """(devices, bytes of each) of "4x80GB".

    Raises:
        ConfigError: for anything else.
    """
    match = re.fullmatch(r"(\d+)\s*x\s*(\d+(?:\.\d+)?)\s*(GB|GiB)", text.strip(), re.IGNORECASE)
    if match is None or int(match[1]) == 0 or float(match[2]) == 0:
        raise ConfigError(Problem("--devices", f"{text!r} is not understood; write devices x memory, e.g. 4x80GB"))
    return int(match[1]), int(float(match[2]) * (1e9 if match[3].lower() == "gb" else 2**30))


def make_plan(
    run_file: RunFile,
    base: Path,
    layout: Layout,
    engines: Sequence[EnginePlace],
    plans: Mapping[str, EnginePlan],
    machine: Machine,
) -> Plan:
    """The plan of a checked placement. `plans` has the DeepSpeed configuration of every role."""
    sources = [source for source, _ in agent_models(run_file, base)]
    of_roles = {role: model_of(role, run_file, base)[0] for role in plans}
    sizes = {s: shape_of_model(s) for s in dict.fromkeys([*sources, *of_roles.values()])}
    models = [sizes[s] for s in sources]
    # Comparators are rollout engines: their memory stands there.
    rows = tuple(
        _role_row(run_file, base, layout, role, plans[role], sizes[of_roles[role]]) for role in layout.roles if role in plans
    )
    dtypes = [r.dtype for r in rows if base_of(r.role) == "actor"]
    engine_dtype = run_file.rollout.dtype if run_file.rollout.dtype != "auto" else dtypes[0]
    memory, ranks = [], {}
    for group, members in layout.groups.items():
        own = [r for r in rows if r.group == group]
        trainer = _trainer_memory(own, plans, len(members), run_file.trainer_config, machine.kind == "cpu")
        for rank in members:
            sampler = Memory()
            for e in engines:
                if rank in e.ranks:
                    sampler.add(_engine_memory(run_file, layout, e, models, engine_dtype, machine))
            ranks[rank] = estimate.together(trainer, sampler, take_turns=machine.kind != "cpu")
        worst = max((ranks[r] for r in members), key=lambda m: m.peak)
        known = worst.known and machine.device_bytes is not None and machine.kind != "cpu"
        fits = worst.peak <= estimate.USABLE * (machine.device_bytes or 0) if known else None
        memory.append(GroupMemory(group, worst, any(e.group == group for e in engines), fits))
    edge_rows = _edge_rows(layout, engines, sources, rows, engine_dtype, machine.kind)
    hosts = [_host_memory(layout, host, ranks, engines, machine) for host in layout.hosts]
    notes = [*layout.notes, *dict.fromkeys(n for p in plans.values() for n in p.notes)]
    notes += _notes(run_file, sizes, plans, memory, hosts, machine)
    return Plan(
        layout, tuple(engines), machine.kind, machine.device_bytes if machine.kind != "cpu" else None, rows, edge_rows,
        tuple(memory), tuple(hosts), tuple(notes),
    )  # fmt: skip


# --- the launch
def _slots(placement: PlacementConfig | None, hostfile: Path | None, devices: str | None) -> list[Slot]:
    count = parse_devices(devices)[0] if devices else None
    if hostfile is None:
        if count is None:
            ranks = [r for ranks in placement.groups.values() if isinstance(ranks, list) for r in ranks] if placement else []
            count = min(max(ranks, default=0) + 1, MOST_RANKS)
        return slots_of_one_host(count)
    slots = slots_of_hostfile(hostfile)
    per_host = Counter(s.host for s in slots)
    if count not in (None, len(slots)) and set(per_host.values()) != {count}:
        raise ConfigError(Problem("--devices", f"{devices!r}, but the hostfile has {len(slots)} slots; write {len(slots)}x…"))
    return slots


def _machine(slots: Sequence[Slot], has_hostfile: bool, devices: str | None) -> Machine:
    here = psutil.virtual_memory().total
    if devices:
        # They may be any machine's: what this one's host has tells nothing.
        return Machine("cuda", parse_devices(devices)[1], {})
    names = {LOCAL, socket.gethostname(), socket.gethostname().partition(".")[0]}
    known = {s.host: here for s in slots if s.host in names}
    if _sees_gpu():
        return Machine("cuda", _gpu_bytes(), known)
    return Machine("cpu", None, known)


def _sees_gpu() -> bool:
    if os.environ.get("CUDA_VISIBLE_DEVICES", "all") in ("", "-1"):
        return False
    return Path("/proc/driver/nvidia/version").exists() or shutil.which("nvidia-smi") is not None


def _gpu_bytes() -> int | None:
    """Memory of the smallest GPU; None where the driver does not tell."""
    command = ["nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=3, check=True).stdout
        return min(int(line) for line in answer.split()) * 2**20
    except (OSError, ValueError, subprocess.SubprocessError):
        return None


def _best_dtype(kind: str) -> str:
    """As engines.hardware.best_dtype, which asks torch."""
    if kind != "cpu":
        return "bfloat16"
    cpuinfo = Path("/proc/cpuinfo")
    flags = set(cpuinfo.read_text().split()) if cpuinfo.is_file() else set()
    return "bfloat16" if flags & {"avx512_bf16", "amx_tile"} else "float32"


# --- DeepSpeed
def _engine_plan(run_file: RunFile, base: Path, role: str, size: int | None, default_dtype: str) -> EnginePlan:
    """The checked DeepSpeed configuration of a role; `size` is that of its group, None where it is not known."""
    own = deepspeed_of(run_file.placement, role)
    prefix, value = own or ("", run_file.deepspeed)
    args: Any = run_file.trainer_config
    batch, rate = args.batch_size, args.agent_learning_rate
    if base_of(role) == "critic":
        rate = args.critic_rate
    elif role == "reward_model":
        batch, rate = args.reward_train_batch_size, args.reward_learning_rate
    numbers = TrainerNumbers(batch, size or 1, rate, args.max_grad_norm, run_file.dtype, default_dtype)
    try:
        return plan_engine(read_deepspeed(value, base), numbers)  # type: ignore[arg-type]
    except ConfigError as error:
        by_size = ("train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
        kept = [p for p in error.problems if size or not (p.path.endswith(by_size) and " ranks" in p.message)]
        raise ConfigError(kept).under(prefix) from None


def _written_size(placement: PlacementConfig | None, role: str) -> int | None:
    """Ranks of a role's group in a placement that has some mistake."""
    section = section_of(placement, role) if placement else None
    group = placement.groups.get(section[1].group) if placement and section and isinstance(section[1].group, str) else None
    if group is None:
        return None
    return sum(map(len, group.values())) if isinstance(group, dict) else len(group)


# --- rows
def _role_row(run_file: RunFile, base: Path, layout: Layout, role: str, plan: EnginePlan, model: ModelShape) -> RoleRow:
    own = deepspeed_of(run_file.placement, role)
    value = own[1] if own else run_file.deepspeed
    name = value if isinstance(value, str) else "in the run file" if value is not None else "default"
    learning = None if base_of(role) in FROZEN else learning_of(role, run_file, base, model)
    return RoleRow(role, layout.roles[role].group, plan.stage, plan.dtype, name, model, learning)


def _trainer_memory(rows: Sequence[RoleRow], plans: Mapping[str, EnginePlan], ranks: int, args: Any, on_cpu: bool) -> Memory:
    """One rank of a group: its roles together, of whose graphs one is held at a time, or all with 'one_forward'.

    Adapters of a rank whose base is the same have it once, where they do not shard it.
    """
    total, largest = Memory(), 0
    bases: set[tuple[str, str]] = set()
    work = Work(args.max_tokens_per_micro_batch, args.logprob_chunk, args.gradient_checkpointing)
    for row in rows:
        config = plans[row.role].config
        zero = config["zero_optimization"]
        if base_of(row.role) in FROZEN:
            total.add(estimate.frozen(row.model, row.dtype, ranks, zero))
            continue
        sums = 4 if config.get("data_types", {}).get("grad_accum_dtype") in (None, "fp32") else 2
        base = (row.learning.base, row.dtype) if row.learning and row.learning.base and row.stage < 3 else None
        one = estimate.trained(
            row.model, row.dtype, ranks, zero, work, sums_bytes=sums, learning=row.learning, base_is_held=base in bases,
            on_cpu=on_cpu,
        )  # fmt: skip
        bases |= {base} if base else set()
        if getattr(args, "margin_pass", "auto") != "one_forward":
            largest = max(largest, one.device.pop("activations", 0))
        total.add(one)
    if largest:
        total.device["activations"] += largest
    return total


def _engine_memory(
    run_file: RunFile, layout: Layout, engine: EnginePlace, models: Sequence[ModelShape], dtype: str, machine: Machine
) -> Memory:
    config = run_file.rollout
    served = [models[i] for i in engine.serves or range(len(models))]
    # One unknown model makes the engine unknown, whatever the others are.
    model = max(served, key=lambda m: float("inf") if m.parameters is None else m.parameters)
    memory = estimate.engine(
        model, dtype, layout.rollout.tensor_parallel, on_cpu=machine.kind == "cpu", kv_cache_bytes=config.kv_cache_bytes,
        share=config.gpu_memory_utilization, device_bytes=machine.device_bytes,
    )  # fmt: skip
    if config.backend == "transformers" and memory.known:
        memory.device["KV cache"] = 0  # it sets none aside
    return memory


def _edge_rows(
    layout: Layout, engines: Sequence[EnginePlace], sources: Sequence[str], roles: Sequence[RoleRow], dtype: str, kind: str
) -> tuple[EdgeRow, ...]:
    rows, shapes, actors = [], [shape_of(s) for s in sources], {r.role: r for r in roles}
    turns = list(dict.fromkeys(shapes))
    for edge in edges(layout, engines, len(sources), kind):
        # Architectures take turns over the engines; weights of another one do not fit.
        if edge.engine.serves is None and shapes[edge.agent] != turns[edge.engine.index % len(turns)]:
            continue
        actor = actors[f"actor.{edge.agent}"]
        lead = layout.ranks_of(actor.role)[0]
        near = layout.host(lead) == layout.host(edge.engine.ranks[0])
        size = estimate.edge_bytes(actor.model, dtype, actor.learning.adapter if actor.learning else None)
        rows.append(EdgeRow(edge, near, size, estimate.edge_seconds(size, edge.transport, near)))
    return tuple(rows)


def _host_memory(
    layout: Layout, host: str, ranks: Mapping[int, Memory], engines: Sequence[EnginePlace], machine: Machine
) -> HostMemory:
    """What a host's processes take outside its GPUs: on a CPU everything, else what is offloaded."""
    mine = [ranks[s.rank] for s in layout.slots if s.host == host]
    needed: int | None = None
    if all(m.known for m in mine):
        processes = len(mine) + sum(layout.host(e.ranks[0]) == host for e in engines)
        needed = processes * estimate.PROCESS_BYTES + sum(m.host + (m.peak if machine.kind == "cpu" else 0) for m in mine)
    return HostMemory(host, needed, machine.host_bytes.get(host))


def _notes(
    run_file: RunFile,
    sizes: Mapping[str, ModelShape],
    plans: Mapping[str, EnginePlan],
    memory: Sequence[GroupMemory],
    hosts: Sequence[HostMemory],
    machine: Machine,
) -> list[str]:
    notes = [] if run_file.trainer_config.disable_dropout else [DROPOUT_NOTE]
    if shared := [m.group for m in memory if m.memory.peak < m.memory.total]:
        notes.append(f"on {', '.join(shared)} actors and engines take turns on the devices; the other waits in host memory")
    for source, shape in sizes.items():
        if shape.origin == "guess":
            notes.append(f"{source} is not on this disk: its size is guessed from its name")
        elif shape.origin == "unknown":
            notes.append(f"{source} is not on this disk, and its name states no size: '?' depends on it")
    for role, plan in plans.items():
        zero = plan.config["zero_optimization"]
        for part in ("offload_optimizer", "offload_param"):
            if (zero.get(part) or {}).get("device") == "nvme":
                notes.append(f"{role}: {part} is on NVMe and in neither memory table")
    if machine.kind != "cpu" and machine.device_bytes is not None:
        room = run_file.rollout.gpu_memory_utilization * machine.device_bytes
        for row in memory:
            if (weights := row.memory.device["vLLM weights"]) and weights >= room:
                share = f"rollout.gpu_memory_utilization leaves an engine {room / 1e9:.0f} GB"
                notes.append(
                    f"group {row.group!r}: {share}, and its weights take {weights / 1e9:.0f} GB;"
                    " write more, or a larger tensor_parallel for rollout"
                )
    if False in [row.fits for row in memory] + [row.fits for row in hosts]:
        notes.append(
            "not everything fits: more ranks at ZeRO-3, offload_optimizer, args.gradient_checkpointing or a smaller"
            " args.max_tokens_per_micro_batch need less"
        )
    return notes
