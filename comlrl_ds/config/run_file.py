"""The run file: everything that a run needs, in one YAML file."""

from __future__ import annotations

import datetime
import re
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import Field, ValidationError, field_validator, model_validator

from comlrl_ds.config.errors import ConfigError, Findings, Problem, Settings, nearest, problems_of
from comlrl_ds.config.iterative import MADPOIterConfig
from comlrl_ds.config.lora import LoraSettings
from comlrl_ds.config.madpo import MADPOConfig, NonNegative, Positive
from comlrl_ds.config.marlhf import MARLHFConfig, MARLHFIterConfig
from comlrl_ds.config.placement import PlacementConfig
from comlrl_ds.config.references import beside, is_path, references, resolve
from comlrl_ds.config.trackers import Tracker, WandbConfig

TRAINERS: dict[str, type[MADPOConfig]] = {
    "madpo": MADPOConfig, "madpo_iter": MADPOIterConfig, "marlhf": MARLHFConfig, "marlhf_iter": MARLHFIterConfig,
}  # fmt: skip


class AgentSection(Settings):
    """One agent."""

    model: str = Field(description="A Hugging Face repository, or a local folder in its layout or in PEFT's.")
    lora: LoraSettings | None = Field(None, description="An adapter that learns in place of the weights.")


class TaskSection(Settings):
    """Where tasks and scores come from; every value but the limit is 'package.module:attribute' or 'file.py:attribute'."""

    dataset: str = Field(description="Training tasks: a sequence of mappings, or a callable that returns one.")
    eval_dataset: str | None = Field(None, description="Tasks for evaluation.")
    reward_func: str = Field(description="The oracle.")
    reward_processor: str | None = Field(None, description="Maps each score.")
    formatters: str | list[str] | None = Field(
        None, description="One for all agents, or one per agent; a name may point to a list."
    )
    centralized_comparator_adapter: str | None = Field(
        None, description="Joins role prompts and takes joint answers apart: an object or a class; None: by tags."
    )
    train_limit: Positive | None = Field(None, description="Use only the first so many training tasks.")


class RolloutConfig(Settings):
    """How completions are sampled."""

    backend: Literal["vllm", "transformers"] = Field("vllm", description="transformers serves where vLLM is not installed.")
    engines: Positive | None = Field(None, description="Engine processes; None: one per core (CPU) or one (GPU), at most 8.")
    urls: list[str] = Field(
        default_factory=list, description="vLLM servers that you started, instead of engines of the run's own."
    )
    threads: Positive | None = Field(None, description="Threads per CPU engine; None: the cores divided by the engines.")
    dtype: Literal["auto", "bfloat16", "float16", "float32"] = Field("auto", description="auto: the actors' compute type.")
    max_model_len: Positive | None = Field(None, description="Longest prompt + completion; None: the model's, at most 4096.")
    max_num_seqs: Positive = Field(256, description="Completions that an engine samples at the same time.")
    kv_cache_bytes: Positive | None = Field(None, description="KV cache per CPU engine; None: 1 GiB.")
    gpu_memory_utilization: float = Field(0.5, gt=0, lt=1, description="Share of a GPU that an engine may take.")
    sleep_level: Literal[1, 2] = Field(
        1, description="Engines that share GPUs with actors: 1 keeps sleeping weights in host memory, 2 drops and resends them."
    )
    start_timeout_s: Positive = Field(600, description="Longest start of an engine.")
    timeout_s: Positive = Field(600, description="Longest silence of a working engine before the run ends.")
    verify_sync: bool = Field(
        True, description="Check after each sync that the engine answers with changed weights, as the trainer does."
    )
    transport: Literal["auto", "host", "nccl", "ipc"] = Field(
        "auto", description="How weights reach an engine; host works everywhere, auto takes the fastest that placement allows."
    )

    lora: Literal["auto", "adapter", "merge"] = Field(
        "auto",
        description="Agents with LoRA: adapter holds the base once and adapters beside it, merge puts them into the weights;"
        " auto: adapter on GPUs where that is possible.",
    )

    @model_validator(mode="after")
    def _servers_alone(self) -> RolloutConfig:
        for k, url in enumerate(self.urls):
            if not url.startswith(("http://", "https://")):
                raise ConfigError(Problem(f"urls.{k}", f"{url!r} is no address of a server; write http://host:port"))
        if self.urls and (self.engines is not None or self.backend != "vllm"):
            raise ConfigError(Problem("urls", "servers of yours take the place of engines; leave engines and backend out"))
        if self.transport in ("nccl", "ipc") and (self.urls or self.backend != "vllm"):
            raise ConfigError(
                Problem("transport", f"{self.transport!r} is for vLLM engines of the run's own; write host or auto")
            )
        return self


class RunSection(Settings):
    """The run itself."""

    dir: str | None = Field(None, description="Where results go; None: runs/<name of the file>-<date and time>.")
    seed: NonNegative = Field(0, description="Everything random follows from it.")
    report_to: list[Tracker] = Field(default_factory=list, description="Trackers beside metrics.jsonl: tensorboard, wandb.")
    wandb: WandbConfig | None = Field(None, description="Settings of Weights & Biases, which is reported to where they stand.")
    checkpoint_interval: NonNegative = Field(1, description="Epochs between checkpoints; 0 saves none.")
    checkpoint_every_updates: Positive | None = Field(None, description="Also within an epoch, after so many updates.")
    checkpoint_total_limit: Positive | None = Field(2, description="Checkpoints that are kept, the newest; null keeps all.")
    stall_timeout_s: float = Field(
        1800, gt=0, description="How long a rank may be silent, or stand still in one piece of work, before the run ends."
    )

    @field_validator("report_to", mode="before")
    @classmethod
    def _one_or_several(cls, value: Any) -> Any:
        return [value] if isinstance(value, str) else value

    @property
    def trackers(self) -> list[str]:
        """Names of the trackers: those of `report_to`, and W&B where it has settings."""
        return list(dict.fromkeys([*self.report_to, *(["wandb"] if self.wandb else [])]))


class RunFile(Settings):
    """A whole run file."""

    trainer: Literal["madpo", "madpo_iter", "marlhf", "marlhf_iter"] = Field(description="The algorithm.")
    agents: list[AgentSection] = Field(min_length=1, description="The team, in order.")
    task: TaskSection
    args: dict[str, Any] = Field(default_factory=dict, description="Settings of the trainer.", repr=False)  # may hold a key
    deepspeed: str | dict[str, Any] | None = Field(None, description="A DeepSpeed JSON file or its content, for every actor.")
    dtype: Literal["auto", "bfloat16", "float32"] = Field(
        "auto", description="Compute type of the actors; masters are fp32 always."
    )
    attn_implementation: str | None = Field("sdpa", description="Attention of the actors; null is the model's default.")
    placement: PlacementConfig | None = Field(None, description="Device groups and their roles; None: one group of all ranks.")
    rollout: RolloutConfig = Field(default_factory=RolloutConfig)
    run: RunSection = Field(default_factory=RunSection)

    def placement_from(self, base: Path) -> PlacementConfig | None:
        """The placement, with DeepSpeed files that stand beside the run file (in `base`) found there."""
        if self.placement is None:
            return None
        copy = self.placement.model_copy(deep=True)
        for section in copy.roles.values():
            if isinstance(section.deepspeed, str) and not Path(section.deepspeed).is_file():
                section.deepspeed = str(base / section.deepspeed)
        return copy

    @property
    def trainer_config(self) -> Any:
        """`args` as the trainer's settings; `num_agents` follows from `agents`."""
        return TRAINERS[self.trainer](**_with_team_size(self.args, len(self.agents)))


def _with_team_size(args: dict[str, Any], agents: int) -> dict[str, Any]:
    """`num_agents` follows from `agents`, but where one actor writes every role."""
    return args if args.get("collaboration_mode") == "centralized" else {"num_agents": agents} | args


class _Loader(yaml.SafeLoader):
    """YAML in which 1e-5 is a number, as in YAML 1.2 and JSON, and a name stands once in a section."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[str] = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and key.tag != "tag:yaml.org,2002:merge":
                if key.value in seen:  # YAML readers take the last one without a word
                    raise yaml.constructor.ConstructorError(None, None, f"{key.value!r} stands twice", key.start_mark)
                seen.add(key.value)
        return super().construct_mapping(node, deep)


_Loader.add_implicit_resolver("tag:yaml.org,2002:float", re.compile(r"[-+]?\d+(\.\d*)?[eE][-+]?\d+"), list("-+0123456789"))


def load_run_file(file: str | Path, overrides: Sequence[str] = ()) -> RunFile:
    """Read, override and check a run file.

    Args:
        file: YAML file.
        overrides: "path.to.setting=value" as on the command line; the value is read as YAML.

    Raises:
        ConfigError: with every problem of the file and of the overrides, and of what the file names: Python objects,
            model folders, the DeepSpeed file. Nothing heavy is imported to find them.
    """
    file, found = Path(file), Findings()
    data = _read(file)
    for text in overrides:
        found.of(partial(_override, data, text))
    run_file = found.of(partial(_validated, data))
    found.problems += _problems_in_args(data)
    if found.problems:
        # Otherwise the trainer finds them, with more to check them by.
        found.problems += _problems_outside(data, file.resolve().parent)
    found.raise_any()
    assert run_file
    if run_file.run.dir is None:
        stamp = datetime.datetime.now().strftime("%Y%m%d-%H%M%S")
        named = run_file.run.wandb.run_dir if run_file.run.wandb else None
        run_file.run.dir = named or str(Path("runs") / f"{file.stem}-{stamp}")
    return run_file


def _read(file: Path) -> dict[str, Any]:
    try:
        data = yaml.load(file.read_text(), _Loader)
    except FileNotFoundError:
        raise ConfigError(Problem(str(file), "no such file")) from None
    except OSError as error:
        raise ConfigError(Problem(str(file), f"cannot be read: {error.strerror}")) from None
    except UnicodeDecodeError as error:
        raise ConfigError(Problem(str(file), f"not YAML: {error}")) from None
    except RecursionError:
        raise ConfigError(Problem(str(file), "not YAML that can be read: it is nested too deeply")) from None
    except yaml.YAMLError as error:  # its own text would show the line, which may hold a key
        mark, problem = getattr(error, "problem_mark", None), getattr(error, "problem", None) or "cannot be parsed"
        where = f", line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        raise ConfigError(Problem(str(file), f"not YAML: {problem}{where}")) from None
    if not isinstance(data, dict):
        raise ConfigError(Problem(str(file), "must be a mapping with trainer, agents, task …"))
    return data


def _validated(data: dict[str, Any]) -> RunFile:
    try:
        return RunFile.model_validate(data)
    except ValidationError as error:
        raise ConfigError(problems_of(error, RunFile)) from None


def _problems_outside(data: dict[str, Any], base: Path) -> list[Problem]:
    """Problems of what the file names, whatever else is wrong with it."""
    found = Findings()
    for path, reference in references(data.get("task")):
        found.of(partial(resolve, reference, path, base))
    agents = data.get("agents")
    for i, agent in enumerate(agents if isinstance(agents, list) else []):
        model = str(agent.get("model", "")) if isinstance(agent, dict) else ""
        if is_path(model) and not Path(beside(model, base)).expanduser().is_dir():
            found.add(f"agents.{i}.model", f"no folder {model!r}")
    deepspeed = data.get("deepspeed")
    if isinstance(deepspeed, str) and not any((folder / deepspeed).is_file() for folder in (Path.cwd(), base)):
        found.add("deepspeed", f"no file {deepspeed!r}")
    return found.problems


def _problems_in_args(data: dict[str, Any]) -> list[Problem]:
    """Problems under `args`, also when other sections are wrong, so that one look shows them all."""
    kind, args, agents = data.get("trainer"), data.get("args") or {}, data.get("agents")
    if kind not in TRAINERS or not isinstance(args, dict):
        return []
    if odd := [name for name in args if not isinstance(name, str)]:
        return [Problem(f"args.{odd[0]}", f"{odd[0]!r} is no name of a setting")]
    count = len(agents) if isinstance(agents, list) and agents else args.get("num_agents", 2)
    if args.get("collaboration_mode") == "centralized":
        if count != 1:
            return [Problem("agents", f"{count} entries, but in collaboration_mode 'centralized' one actor writes every role")]
    elif args.get("num_agents", count) != count:
        return [Problem("args.num_agents", f"{args['num_agents']} contradicts the {count} entries of agents; leave it out")]
    try:
        TRAINERS[kind](**_with_team_size(args, count))
    except ConfigError as error:
        return error.under("args").problems
    return []


def _override(data: dict[str, Any], text: str) -> None:
    path, equals, value = text.partition("=")
    if not equals or not path:
        raise ConfigError(Problem(text.split()[0] if text.split() else text, "not an override; write path.to.setting=value"))
    *parents, last = _words(path)
    place: Any = data
    for part in parents:
        place = _step(place, part, path)
    try:
        parsed = yaml.load(value, _Loader)
    except yaml.YAMLError:
        parsed = value
    if isinstance(place, list):
        _step(place, last, path)
        place[int(last)] = parsed
    else:
        place[last] = parsed


def _words(path: str) -> list[str]:
    """The parts of a path; the name of a role of one agent (actor.0) is one part."""
    words = path.split(".")
    if words[:2] == ["placement", "roles"] and len(words) > 3 and words[3].isdigit():
        words[2:4] = [".".join(words[2:4])]
    return words


def _step(place: Any, part: str, path: str) -> Any:
    if isinstance(place, list):
        if not part.isdigit() or int(part) >= len(place):
            raise ConfigError(Problem(path, f"{part!r} is no index of a list of {len(place)}"))
        return place[int(part)]
    inner = place.get(part)
    if inner is None:
        if place and part not in RunFile.model_fields and place.keys() & RunFile.model_fields.keys():
            raise ConfigError(Problem(path, f"unknown section {part!r}{nearest(part, list(RunFile.model_fields))}"))
        inner = place[part] = {}
    if not isinstance(inner, dict | list):
        raise ConfigError(Problem(path, f"{part!r} is {'empty' if inner is None else type(inner).__name__}, not a section"))
    return inner
