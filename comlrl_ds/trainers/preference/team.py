"""The team that a user describes: models, tokenizers, formatters, oracle. Checked before any model is loaded."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from comlrl_ds.config.errors import ConfigError, Findings, Problem
from comlrl_ds.config.lora import LoraSettings
from comlrl_ds.config.madpo import MADPOConfig
from comlrl_ds.config.model_files import check_vocabulary
from comlrl_ds.config.placement import PlacementConfig
from comlrl_ds.config.run_file import RolloutConfig
from comlrl_ds.config.task import as_list, check_tasks
from comlrl_ds.preference.centralized import CentralizedComparatorAdapter, check_adapter, joint_prompt
from comlrl_ds.preference.oracle import Oracle
from comlrl_ds.preference.prompts import Formatter, JointPromptBuilder, PromptBuilder, PromptError, check_formatters
from comlrl_ds.preference.teams import JointTeam, Team
from comlrl_ds.rollout.adapters import is_adapter

MODEL_KEYS = ("torch_dtype", "dtype", "attn_implementation", "model_kwargs", "critic_model_kwargs", "special_tokens")


@dataclass(frozen=True)
class ModelConfig:
    """What `model_config` may say of the actors."""

    dtype: str = "auto"
    attn_implementation: str | None = "sdpa"

    @staticmethod
    def read(value: Mapping[str, Any] | None) -> ModelConfig:
        """The peer's dict, checked."""
        value = dict(value or {})
        problems = [
            Problem(f"model_config.{k}", f"unknown key; valid: {', '.join(MODEL_KEYS)}") for k in value if k not in MODEL_KEYS
        ]
        nested = dict(value.get("model_kwargs") or {})
        dtype = str(value.get("dtype", value.get("torch_dtype", nested.get("torch_dtype", "auto")))).removeprefix("torch.")
        dtype = {"bf16": "bfloat16", "fp32": "float32", "float": "float32", "fp16": "float16", "half": "float16"}.get(
            dtype, dtype
        )
        if dtype not in ("auto", "bfloat16", "float16", "float32"):
            problems.append(Problem("model_config.dtype", f"{dtype!r} is not one of auto, bfloat16, float16, float32"))
        if value.get("special_tokens"):
            problems.append(Problem("model_config.special_tokens", "add tokens to the model and its tokenizer before training"))
        if problems:
            raise ConfigError(problems)
        return ModelConfig(dtype, value.get("attn_implementation", nested.get("attn_implementation", "sdpa")))


def read_agents(agent_model: Any, agents: Sequence[Any] | None, num_agents: int) -> list[Any]:
    """Model of each agent, from the peer's two arguments.

    `agent_model` is one source for all; `agents` lists sources or model objects; both together must agree.
    """
    if agents is not None:
        listed = as_list(agents, "agents", "agent")
        if not listed:
            raise ConfigError(Problem("agents", "empty; give one model per agent"))
        if agent_model is not None and (
            len(listed) != num_agents or any(isinstance(a, str) and a != agent_model for a in listed)
        ):
            raise ConfigError(Problem("agents", f"contradicts agent_model = {agent_model!r}; give one of the two"))
        return listed
    if isinstance(agent_model, str | Path):
        return [str(agent_model)] * num_agents
    if agent_model is None:
        raise ConfigError(Problem("agent_model", "required: a model for all agents, or agents = [one per agent]"))
    raise ConfigError(Problem("agent_model", "a model object serves one agent; give agents = [one per agent]"))


def split_adapters(listed: Sequence[Any], lora: Sequence[LoraSettings | None]) -> tuple[list[Any], list[LoraSettings | None]]:
    """(model sources, LoRA settings) where a source may be a PEFT folder: it is then the adapter to start from.

    Raises:
        ConfigError: a folder that does not say which model it is for, or that meets settings of its agent.
    """
    from comlrl_ds.engines.loading import adapted_base

    found, sources, settings = Findings(), list(listed), list(lora)
    for i, (model, own) in enumerate(zip(listed, lora)):
        where = f"agents.{i}.model"
        folder = own.adapter if own and own.adapter else str(model)
        if not isinstance(model, str | Path) or not is_adapter(Path(folder).expanduser()):
            if own and own.adapter:
                found.add(f"agents.{i}.lora.adapter", f"{own.adapter!r} is no PEFT folder")
            continue
        folder = str(Path(folder).expanduser().resolve())
        if folder == str(Path(model).expanduser().resolve()):
            if own is not None:
                found.add(f"agents.{i}.lora", f"{str(model)!r} is an adapter with settings of its own; leave lora out")
                continue
            sources[i] = found.of(partial(adapted_base, folder, where)) or ""
        settings[i] = LoraSettings(adapter=folder)
    found.raise_any()
    return sources, settings


@dataclass
class TeamSetup:
    """Everything about the agents that needs no model in memory."""

    sources: list[str]
    team: Team
    oracle: Oracle
    formatters: list[Formatter]
    prompt_limits: list[int]
    args: MADPOConfig
    adapter: CentralizedComparatorAdapter
    more: list[str] | None = None  # what to do for longer prompts

    def prompt_builder(self, limits: Sequence[int] | None = None) -> PromptBuilder:
        """Builds the actors' prompts; `limits` replaces their longest lengths."""
        limits = self.prompt_limits if limits is None else limits
        if self.args.centralized:
            return self.joint_builder(self.team.tokenizers[0], limits[0], self.more)
        return PromptBuilder(self.team.tokenizers, self.formatters, limits, self.args.overlong_prompt, self.more)

    def joint_builder(
        self, tokenizer: Any, limit: int, more: Sequence[str] | None, writer: str = "agent 0"
    ) -> JointPromptBuilder:
        """Builds prompts for one writer of every role.

        Args:
            more: what to do for longer prompts. writer: what it is called in errors.
        """
        join = partial(joint_prompt, self.adapter)
        return JointPromptBuilder(tokenizer, self.formatters, join, limit, self.args.overlong_prompt, more, writer)

    def try_first_prompt(self, dataset: Sequence[Mapping[str, Any]], name: str) -> None:
        """Formats the first task, so that a formatter or template that cannot work ends the run here."""
        check_tasks(dataset, name)
        try:
            self.prompt_builder([1 << 60] * self.team.size).build(dataset, [0])
        except PromptError as error:
            raise ConfigError(Problem(name, str(error))) from None


def set_up_team(
    sources: Sequence[str],
    tokenizer: Any,
    formatters: Formatter | Sequence[Formatter] | None,
    reward_func: Callable[..., Any] | None,
    reward_processor: Callable[[float], float] | None,
    args: MADPOConfig,
    rollout: RolloutConfig,
    adapter: Any = None,
) -> TeamSetup:
    """Checks and loads what is light: tokenizers, formatters, the oracle's signature, token limits."""
    from comlrl_ds.engines.loading import load_tokenizer, stop_ids
    from comlrl_ds.rollout.start import length_limit, vllm_is_installed

    found = Findings()
    if rollout.backend == "vllm" and not vllm_is_installed():
        found.add("rollout.backend", "vLLM is not installed; install comlrl-ds[cpu] or comlrl-ds[gpu], or write transformers")
    given = list(tokenizer) if isinstance(tokenizer, list | tuple) else [tokenizer] * len(sources)
    if len(given) != len(sources):
        found.add("tokenizer", f"{len(given)} tokenizers for {len(sources)} agents; give one, or {len(sources)}")
        given = [None] * len(sources)
    loaded: dict[str, Any] = {}
    for i, (source, own) in enumerate(zip(sources, given)):
        if own is None:
            if source not in loaded:
                loaded[source] = found.of(partial(load_tokenizer, source, f"agents.{i}.model"))
            given[i] = loaded[source]
        else:
            found.of(partial(_check_tokenizer, own, source, i))
    checked = found.of(lambda: check_formatters(formatters, args.num_agents))
    adapter = check_adapter(adapter)
    oracle = None
    if reward_func is None:
        found.add("reward_func", "required: a function that scores joint responses")
    else:
        oracle = found.of(partial(Oracle, reward_func, args.num_agents, reward_processor))
    longest = [length_limit(rollout, s) for s in sources]
    for i, (room, new) in enumerate(zip(longest, args.token_limits)):
        if message := room.no_room(new, f"agent {i}"):
            found.add("max_new_tokens", message)
    found.raise_any()
    assert oracle and checked
    stops = [stop_ids(s, t) for s, t in zip(sources, given)]
    team = Team(given, args.token_limits, stops)
    if args.centralized:
        team = JointTeam(given, args.token_limits, stops, roles=args.num_agents, adapter=adapter, keep_unparsed=True)
    limits = [room.tokens - new for room, new in zip(longest, args.token_limits)]
    return TeamSetup(list(sources), team, oracle, checked, limits, args, adapter, [room.more for room in longest])


def _check_tokenizer(tokenizer: Any, source: str, agent: int) -> None:
    if not hasattr(tokenizer, "get_vocab"):
        message = f"{type(tokenizer).__name__} is no tokenizer; give one for all agents, or a list, one per agent"
        raise ConfigError(Problem("tokenizer", message))
    check_vocabulary(source, tokenizer.get_vocab(), f"agents.{agent}.model")


def read_placement(value: PlacementConfig | Mapping[str, Any] | None) -> PlacementConfig | None:
    """The `placement` argument, checked as far as that needs no ranks."""
    if value is None or isinstance(value, PlacementConfig):
        return value
    if not isinstance(value, Mapping):
        raise ConfigError(Problem("placement", f"must be {{'groups': …, 'roles': …}}, got {type(value).__name__}"))
    try:
        return PlacementConfig(**value)
    except ConfigError as error:
        raise error.under("placement") from None
