"""Starts a run's engines, each on the rank that hosts it."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from comlrl_ds.cluster import Cluster, Seat, call
from comlrl_ds.cluster.engine_places import edge_transport, place_engines
from comlrl_ds.cluster.layout import EnginePlace, Layout
from comlrl_ds.cluster.watch import ClusterFailure
from comlrl_ds.config.run_file import RolloutConfig
from comlrl_ds.rollout.agreement import COARSEST, Reference, check_agreement, layers_of_model
from comlrl_ds.rollout.base import PolicyWeights, RolloutEngine, SyncReport
from comlrl_ds.rollout.disk import shape_of
from comlrl_ds.rollout.engine_client import EngineClient, VLLMRollout
from comlrl_ds.rollout.engine_process import EngineAddress, EngineProcess
from comlrl_ds.rollout.engine_settings import AdapterRoom, engine_settings, probe_rows
from comlrl_ds.rollout.environment import engine_environment
from comlrl_ds.rollout.http_calls import server_limit
from comlrl_ds.rollout.http_rollout import HTTPRollout
from comlrl_ds.rollout.plugin import SWITCH
from comlrl_ds.rollout.pool import RolloutPool, Wanted
from comlrl_ds.rollout.transfer import Target, reference_of, send_live

LONGEST_BY_DEFAULT = 4096


def model_limits(source: str) -> tuple[int, int]:
    """(longest sequence, vocabulary size) that a model folder's config states."""
    config = json.loads((Path(source) / "config.json").read_text())
    config = config.get("text_config", config)
    longest = next((int(config[k]) for k in ("max_position_embeddings", "n_positions") if config.get(k)), LONGEST_BY_DEFAULT)
    return longest, int(config["vocab_size"])


@dataclass(frozen=True)
class LengthLimit:
    """Longest prompt + completion in tokens, and what sets it, with what to do for more."""

    tokens: int
    more: str

    def no_room(self, new_tokens: int, whose: str) -> str | None:
        """What is wrong where completions of so many tokens leave no room for a prompt; None where they do."""
        if new_tokens < self.tokens:
            return None
        left = f"{new_tokens} new tokens leave no room for a prompt in {self.tokens} tokens"
        return f"{whose}: {left}; lower max_new_tokens, or {self.more}"


def length_limit(config: RolloutConfig, source: str) -> LengthLimit:
    """The tightest limit on the sequences of an engine for this model: the model's, the settings', or a server's own."""
    longest, _ = model_limits(source)
    limits = [LengthLimit(longest, f"take a model with more than {longest} positions")]
    if config.max_model_len:
        limits.append(LengthLimit(config.max_model_len, "raise rollout.max_model_len"))
    elif longest > LONGEST_BY_DEFAULT:
        limits.append(LengthLimit(LONGEST_BY_DEFAULT, f"set rollout.max_model_len, which is {LONGEST_BY_DEFAULT} by default"))
    for url in config.urls:
        if (tokens := server_limit(url)) is not None:
            limits.append(LengthLimit(tokens, f"start the server at {url} with a larger --max-model-len than {tokens}"))
    return min(limits, key=lambda limit: limit.tokens)


def max_model_len(config: RolloutConfig, source: str) -> int:
    """Longest prompt + completion of an engine for this model."""
    return length_limit(config, source).tokens


def vllm_is_installed() -> bool:
    # By module, not by distribution: the CPU build is another distribution with the same module.
    return importlib.util.find_spec("vllm") is not None


def start_engine(
    seat: Seat, settings: dict[str, Any], *, slots: Sequence[int], neighbours: int, threads: int | None, log: str | None,
    environment: dict[str, str], **options: Any,
) -> EngineProcess:  # fmt: skip
    """An engine child of this rank, for `Cluster.create`.

    Args:
        slots: local indices of its GPUs; none on a CPU. neighbours: engines of this machine, which share its cores.
        threads: of a CPU engine; None: its share of the cores. environment: what this engine's differs in.
        options: `EngineProcess`'s.
    """
    devices = [_visible_devices()[k] for k in slots]
    if not slots:
        threads = threads or max(1, cores() // neighbours)
    own = engine_environment(os.environ, threads=None if slots else threads, devices=devices) | environment
    output = open(log, "ab") if log else None  # noqa: SIM115
    try:
        return EngineProcess(settings, own, log=output, **options)
    finally:
        if output:
            output.close()


class Engines:
    """The engines of a run while they start: children at once, `pool()` when they are needed.

    Args:
        config: the rollout section. sources: model folder of each agent. comparators: of each comparator with a model of
            its own. swaps: whether engines will be given weights from disk. adapters: room for adapters, which they take in
            place of whole weights.
        cluster: arranged. device: "cpu" or "cuda". dtype: compute type of the engines, "bfloat16", "float16" or "float32".
        log: file for what the children print; None is their ranks' own output.
    """

    def __init__(
        self, config: RolloutConfig, sources: Sequence[str], *, cluster: Cluster, device: str, dtype: str,
        log: Path | None = None, comparators: Sequence[str] = (), swaps: bool = False, adapters: AdapterRoom | None = None,
    ) -> None:  # fmt: skip
        assert cluster.layout
        self._config, self._cluster, self._layout, self._dtype = config, cluster, cluster.layout, dtype
        self._device, self._adapters = device, adapters
        self._pool: RolloutPool | None = None
        self._engines: list[RolloutEngine] = []
        self._transports: list[str] = []
        self._sleepers: list[VLLMRollout] = []
        self._asleep = False
        self._places: list[EnginePlace] = []
        self._agents = len(sources)
        self._sources = [*sources, *comparators]
        if config.urls:
            self._engines = [self._external(k, url) for k, url in enumerate(config.urls)]
            return
        self._places = engine_places(config, self._layout, sources, device, comparators, swaps)
        self._sources = [_source_of(p, sources, comparators, bool(self._layout.comparator_groups)) for p in self._places]
        if config.backend == "transformers" and cluster.launch.size == 1:
            import torch

            from comlrl_ds.rollout.transformers_rollout import TransformersRollout

            self._engines = [TransformersRollout(s, dtype=getattr(torch, dtype), device=device) for s in self._sources]
            return
        self._start_children(log)

    def _external(self, index: int, url: str) -> HTTPRollout:
        config = self._config
        smallest = min(model_limits(source)[1] for source in self._sources)
        probe = probe_rows(smallest) if config.verify_sync else ()
        return HTTPRollout(
            url, self._sources, index=index, start_timeout_s=config.start_timeout_s, timeout_s=config.timeout_s, probe=probe,
            requests=config.max_num_seqs,
        )  # fmt: skip

    def _start_children(self, log: Path | None) -> None:
        config, layout, device = self._config, self._layout, self._device
        far = len({m.host.identity for m in self._cluster.members()}) > 1
        builds, hosts = {}, {}
        for place, source in zip(self._places, self._sources):
            served = place.serves[0] if place.serves and len(place.serves) == 1 else None
            transport = "host" if served is None else edge_transport(layout, place, served, device)
            self._transports.append(transport)
            settings = engine_settings(
                source, device=device, dtype=self._dtype, max_model_len=max_model_len(config, source),
                max_num_seqs=config.max_num_seqs, kv_cache_bytes=config.kv_cache_bytes, transport=transport,
                gpu_memory_utilization=config.gpu_memory_utilization, tensor_parallel=len(place.ranks),
                sleeps=self._shares_devices(place, device), backend=config.backend,
                adapters=self._adapters,
            )  # fmt: skip
            host = layout.host(place.ranks[0])
            builds[engine_role(place)] = call(
                start_engine, settings,
                slots=[layout.slots[r].slot for r in place.ranks] if device != "cpu" else [],
                neighbours=sum(layout.host(p.ranks[0]) == host for p in self._places) * len(place.ranks),
                threads=config.threads, log=str(log) if log else None,
                probe=probe_rows(model_limits(source)[1]) if config.verify_sync else (),
                start_timeout_s=config.start_timeout_s, far=far,
                environment=_environment(place, device, transport, self._adapters is not None),
            )  # fmt: skip
            hosts[engine_role(place)] = place.ranks[:1]
        self._cluster.create(builds, hosts)

    def pool(self, on_sync: Callable[[PolicyWeights, int, SyncReport], None] | None = None) -> RolloutPool:
        """The engines, ready."""
        if self._pool is None:
            if not self._engines:
                self._engines = self._connect()
            for engine in self._engines:
                if isinstance(engine, HTTPRollout):
                    engine.wait_ready()
            self._pool = RolloutPool(self._engines, shape_of, self._config.timeout_s, on_sync, self._move)
        return self._pool

    @property
    def interrupted(self) -> bool:
        """Whether a generation was left before its end, so that engines are still at it."""
        return self._pool is not None and self._pool.interrupted

    def _shares_devices(self, place: EnginePlace, device: str) -> bool:
        """Whether its GPUs are an actor group's too: then one of the two is out of the way while the other works."""
        return device != "cpu" and any(place.group == r.group for r in self._layout.roles.values())

    def _connect(self) -> list[RolloutEngine]:
        members = self._cluster.members()
        ready = self._cluster.run({engine_role(p): call(ready_child) for p in self._places})
        engines: list[RolloutEngine] = []
        for place, source, transport in zip(self._places, self._sources, self._transports):
            role, host = engine_role(place), members[place.ranks[0]].host
            found = ready[role]
            address = EngineAddress(
                found["local"], found["port"], found["key"], host.address, host.identity, source, place.index, transport
            )
            engine = VLLMRollout(
                address=address, identity=members[0].host.identity, timeout_s=self._config.timeout_s,
                verify=self._config.verify_sync, ended=self._how_it_ended(role),
            )  # fmt: skip
            if self._config.verify_sync:
                engine.probe_rows = probe_rows(model_limits(source)[1])
            engine.takes_adapters = self._adapters is not None
            engine.serves = _serves(place, self._layout.comparator_groups, self._agents)
            engine.wait_ready(found["probe"])
            engines.append(engine)
            if self._shares_devices(place, self._device):
                self._sleepers.append(engine)
        return engines

    def _how_it_ended(self, role: str) -> Callable[[], str]:
        return lambda: self._cluster.run({role: call(EngineProcess.how_it_ended)})[role]

    def _move(self, wanted: Sequence[Wanted]) -> list[SyncReport]:
        """Live actors' weights travel from their ranks, groups at the same time; what is on disk goes from here."""
        live: dict[str, list[int]] = {}
        reports: dict[int, SyncReport] = {}
        for k, (engine, policy) in enumerate(wanted):
            if policy.role and isinstance(engine, EngineClient):
                live.setdefault(policy.role, []).append(k)
            else:
                reports[k] = engine.sync_weights(policy)
                if policy.role and self._config.verify_sync:  # an engine of this process, which took them from the actor here
                    rows = probe_rows(model_limits(engine.source)[1])
                    trainer = self._cluster.run({policy.role: call(reference_of, rows)})[policy.role]
                    self._judge(engine, policy, trainer, engine.prompt_logprobs(rows))
        calls = {}
        for role, listed in live.items():
            policy = wanted[listed[0]][1]
            targets = [self._target(wanted[k][0]) for k in listed]
            calls[role] = call(send_live, policy.name, policy.key, self._dtype, targets, base=policy.base)
        for role, results in (self._cluster.run(calls) if calls else {}).items():
            for k, result in zip(live[role], results):
                engine, policy = wanted[k]
                assert isinstance(engine, EngineClient)
                judge = partial(self._judge, engine, policy, result["trainer"]) if engine.verify else None
                engine.synced(policy, result["manifest"], result["probe"], judge)
                reports[k] = SyncReport(result["seconds"], result["bytes"])
        return [reports[k] for k in range(len(wanted))]

    def _judge(
        self, engine: RolloutEngine, policy: PolicyWeights, trainer: dict[str, Any], found: Sequence[Sequence[float]]
    ) -> None:
        check_agreement(
            policy.name, f"engine {self._engines.index(engine)} for {engine.source}", found, Reference(**trainer),
            dtype=COARSEST if isinstance(engine, HTTPRollout) else self._dtype, layers=layers_of_model(policy.source),
            on_cpu=self._device == "cpu" and not isinstance(engine, HTTPRollout),
        )  # fmt: skip

    def _target(self, engine: RolloutEngine) -> dict[str, Any]:
        assert isinstance(engine, EngineClient)
        rows = tuple(map(tuple, engine.probe_rows))
        return Target(engine.address, engine.manifest, self._config.timeout_s, rows).as_plain()

    def usage(self) -> list[dict[str, float]]:
        """CPU seconds and peak memory of each engine process."""
        return [e.usage() for e in self._engines if isinstance(e, VLLMRollout)]

    def sleep(self) -> None:
        """Engines that share GPUs with actors give their memory back."""
        if self._sleepers and not self._asleep:
            for engine in self._sleepers:
                engine.calls.call("sleep", level=self._config.sleep_level)
                if self._config.sleep_level == 2:
                    engine.held = ""  # its weights are gone: whatever it samples next is sent before
            self._asleep = True

    def wake(self) -> None:
        """They take it again; after level 1 weights are those from before, and so is `held`."""
        if self._asleep:
            for engine in self._sleepers:
                engine.calls.call("wake", tags=["weights", "kv_cache"])
                if engine.takes_adapters:
                    engine.held = engine.source  # its base; adapters come again
            self._asleep = False

    @property
    def share_devices(self) -> bool:
        return bool(self._sleepers)

    def shutdown(self) -> None:
        for engine in self._engines:
            engine.shutdown()
        self._engines = []
        if not self._cluster.reaches_all:
            return  # the other ranks may have left; their engines go with them
        roles = [role for p in self._places if (role := engine_role(p)) in self._cluster.placed]
        with contextlib.suppress(ClusterFailure):  # then they are gone with their ranks
            self._cluster.run({role: call(EngineProcess.ask_to_end) for role in roles})
            self._cluster.run({role: call(EngineProcess.shutdown) for role in roles})
            self._cluster.drop(roles)


def ready_child(child: EngineProcess) -> dict[str, Any]:
    """Waits for a child; where it listens, and what it answers at first."""
    return child.wait_ready() | {"local": child.local, "key": child.key}


def engine_role(place: EnginePlace) -> str:
    return f"engine.{place.index}"


def engine_places(
    config: RolloutConfig, layout: Layout, sources: Sequence[str], device: str, comparators: Sequence[str] = (),
    swaps: bool = False,
) -> list[EnginePlace]:  # fmt: skip
    """Where a run's engines are. Several one-thread engines sample faster on a CPU than one with several threads.

    Args:
        comparators: models of comparators that are not the agents' own. swaps: whether engines will be given weights from
            disk, which take the way through host memory.
    """
    own = [g for g in layout.comparator_groups if g not in layout.rollout.groups]
    shapes = len({shape_of(s) for s in (sources if own else [*sources, *comparators])})
    count = config.engines
    if count is None and len(layout.slots) == 1 and config.backend == "vllm" and device == "cpu":
        count = max(1, min(8, cores() // (config.threads or 1)))
    if shapes > 1:
        chunks = sum(len(layout.groups[g]) // layout.rollout.tensor_parallel for g in layout.rollout.groups)
        count = max(count or chunks, shapes)
    elif count is None and config.backend == "transformers" and len(layout.slots) == 1:
        count = 1
    transport = config.transport if config.backend == "vllm" and not (swaps and config.transport == "auto") else "host"
    places = place_engines(layout, engines=count, agents=len(sources), device_kind=device, transport=transport)
    for group in own:
        alone = range(max(len(layout.groups[group]), len({shape_of(s) for s in comparators})))
        ranks = layout.groups[group]
        places += [EnginePlace(len(places) + k, (ranks[k % len(ranks)],), group, comparator=True) for k in alone]
    return places


def _serves(place: EnginePlace, comparator_groups: Sequence[str], agents: int) -> tuple[str, ...] | None:
    """Names of the policies that an engine takes; None: any."""
    mine = range(agents) if place.serves is None else place.serves
    if place.comparator:
        return tuple(f"comparator_{i}" for i in range(agents))
    if comparator_groups and place.group not in comparator_groups:
        return tuple(f"agent_{i}" for i in mine)
    if place.serves is None:
        return None
    return tuple(f"{side}_{i}" for side in ("agent", "comparator") for i in mine)


def _source_of(place: EnginePlace, agents: Sequence[str], comparators: Sequence[str], apart: bool) -> str:
    """Architectures take turns, and within one the folders: each engine starts with weights that are needed.

    Args:
        apart: whether comparators have groups, and so engines, of their own.
    """
    if place.serves:
        return agents[place.serves[0]]
    sources = (comparators or agents) if place.comparator else agents if apart else [*agents, *comparators]
    shapes: dict[str, list[str]] = {}
    for source in sources:
        known = shapes.setdefault(shape_of(source), [])
        if source not in known:
            known.append(source)
    folders = list(shapes.values())[place.index % len(shapes)]
    return folders[place.index // len(shapes) % len(folders)]


def _environment(place: EnginePlace, device: str, transport: str, adapters: bool) -> dict[str, str]:
    own = {SWITCH: "1"} if adapters and device == "cpu" else {}
    if transport == "ipc":
        return {"VLLM_ALLOW_INSECURE_SERIALIZATION": "1"}  # memory handles of the trainer's ranks
    if device == "cpu" and len(place.ranks) > 1:
        # One list of cores per worker; left to itself, vLLM wants a memory node for each.
        return own | {"VLLM_CPU_OMP_THREADS_BIND": "|".join(str(k) for k in range(len(place.ranks)))}
    return own


def cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _visible_devices() -> list[str]:
    import torch

    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return visible.split(",") if visible else [str(k) for k in range(torch.cuda.device_count())]
