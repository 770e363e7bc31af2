"""What all preference trainers share: a checked team, running parts that start when needed, evaluation, saving."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from comlrl_ds.cluster import call, join
from comlrl_ds.cluster.devices import FIELDS
from comlrl_ds.cluster.layout import Layout
from comlrl_ds.cluster.placement import comparator_roles, resolve_placement
from comlrl_ds.config.errors import ConfigError, Findings, Problem
from comlrl_ds.config.lora import LoraSettings, read_lora
from comlrl_ds.config.lora_layers import check_lora
from comlrl_ds.config.madpo import DROPOUT_NOTE, MADPOConfig
from comlrl_ds.config.placement import PlacementConfig
from comlrl_ds.config.run_file import TRAINERS, RolloutConfig
from comlrl_ds.config.task import as_sequence
from comlrl_ds.maths.seeds import seed_of
from comlrl_ds.preference.collection import EVAL, JointSampler, SampledItem
from comlrl_ds.preference.evaluation import Evaluation, evaluation_of, write_samples
from comlrl_ds.preference.prompts import JointPrompt, PromptBuilder
from comlrl_ds.preference.records import PreferencePair
from comlrl_ds.preference.teams import agent_name
from comlrl_ds.preference.user_metrics import EvaluationUser, UserMetrics, moved_line
from comlrl_ds.rollout.adapter_room import adapter_room
from comlrl_ds.rollout.base import Sampling
from comlrl_ds.rollout.start import engine_places
from comlrl_ds.rollout.vllm_models import check_head_size
from comlrl_ds.runs.display import Display
from comlrl_ds.runs.files import write_atomically
from comlrl_ds.trainers.preference.conducted import conducted
from comlrl_ds.trainers.preference.handed_models import ModelCopies, folders_of, is_model
from comlrl_ds.trainers.preference.lifetime import EngineOwner
from comlrl_ds.trainers.preference.reporting import Reporter, overlong_text
from comlrl_ds.trainers.preference.run_arguments import read_run
from comlrl_ds.trainers.preference.session import Adapter, EngineSettings, Rates, Session, actor_role, plan_actors
from comlrl_ds.trainers.preference.team import (
    ModelConfig,
    TeamSetup,
    read_agents,
    read_placement,
    set_up_team,
    split_adapters,
)

if TYPE_CHECKING:
    from comlrl_ds.engines.heads import ValueHead

GENERATION_KEYWORDS = ("temperature", "top_p", "top_k", "min_new_tokens")


class PreferenceTrainer(EngineOwner):
    """Base of the public trainers. The constructor checks everything and loads no model.

    Args:
        agent_model: model source for all agents. agents: one source or model object per agent.
        num_agents: ignored when `agents` is given. tokenizer: one, or one per agent; None loads them from the sources.
        model_config: dtype and attn_implementation of the actors.
        train_dataset, eval_dataset: sequences of mappings.
        reward_func: the oracle (see `comlrl_ds.preference.oracle.Oracle`). reward_processor: maps each score.
        formatters: one, or one per agent: task → string or chat messages.
        external_transition: no effect at one turn.
        centralized_comparator_adapter: joins role prompts and takes joint answers apart, where one model writes every role;
            None: the tagged one.
        wandb_config: settings of Weights & Biases, which is reported to where they are given (`WandbConfig`).
        eval_logger, eval_aggregator: both together add metrics to an evaluation (`EvaluationUser.metrics`).
        args: the settings.
        placement: device groups and the roles on them; None puts every role on all ranks.
        rollout: how completions are sampled. deepspeed: a DeepSpeed file or dict for every actor.
        run_dir: where results go (default runs/<trainer>-<time>).
        seed: everything random follows from it. None: a resumed run keeps its own; any other takes torch.initial_seed() modulo
            2⁶³, so that torch.manual_seed decides.
        report_to: trackers beside metrics.jsonl: "tensorboard", "wandb".
        stall_timeout_s: how long a rank may be silent or stand still before the run ends.
        verbose: print progress.
        resume: "never"; "auto" goes on with the run in run_dir, if there is one; or a checkpoint's folder.
        checkpoint_interval: epochs between checkpoints, 0 for none. checkpoint_every_updates: and updates, within an epoch.
        checkpoint_total_limit: checkpoints that are kept, the newest; None keeps all.
        lora: adapters in place of full weights (`LoraSettings`): a mapping for all agents, or one or None for each. An agent
            whose model is a PEFT folder goes on from that.

    In a launch of several ranks each makes the same trainer; only the main one (global rank 0) looks at the arguments, and
    the others work for it inside `train`, `evaluate` and the other methods, which return the same on all.

    Raises:
        ConfigError: a ValueError with every problem, before anything is loaded.
    """

    config_class: ClassVar[type[MADPOConfig]] = MADPOConfig

    def __init__(
        self, agent_model: str | None = None, agents: Sequence[Any] | None = None, num_agents: int = 2, tokenizer: Any = None,
        model_config: Mapping[str, Any] | None = None, train_dataset: Any = None, eval_dataset: Any = None,
        reward_func: Callable[..., Any] | None = None, reward_processor: Callable[[float], float] | None = None,
        formatters: Any = None, external_transition: Any = None, wandb_config: Mapping[str, Any] | None = None,
        eval_logger: Callable[..., Any] | None = None, eval_aggregator: Callable[..., Any] | None = None,
        args: MADPOConfig | None = None, *, placement: PlacementConfig | Mapping[str, Any] | None = None,
        rollout: RolloutConfig | Mapping[str, Any] | None = None, deepspeed: Any = None, run_dir: str | Path | None = None,
        seed: int | None = None, report_to: str | Sequence[str] = (), stall_timeout_s: float = 1800,
        verbose: bool | None = None, resume: str = "never", checkpoint_interval: int = 1,
        checkpoint_every_updates: int | None = None, checkpoint_total_limit: int | None = 2,
        centralized_comparator_adapter: Any = None, lora: Any = None,
    ) -> None:  # fmt: skip
        from comlrl_ds.engines.ds_config import read_deepspeed
        from comlrl_ds.engines.hardware import device_kind

        super().__init__()
        self.cluster = join()
        self.evaluations: list[tuple[str, Evaluation]] = []
        self._moved: set[str] = set()  # metrics of the user's that were named otherwise
        if not self.cluster.is_main:
            self.args = args or self.config_class(num_agents=len(agents) if agents is not None else num_agents)
            return
        # The nearest of the four kinds, as each is a subclass of others.
        kinds = [c for c in type(args).__mro__ if c in TRAINERS.values()]
        if args is not None and kinds[:1] != [self.config_class]:
            raise ConfigError(
                Problem("args", f"{type(args).__name__}; give {type(self).__name__} a {self.config_class.__name__}")
            )
        one = args is not None and args.centralized
        listed = read_agents(agent_model, agents, 1 if one else num_agents)
        self.args = args or self.config_class(num_agents=len(listed))
        if self.args.num_actors != len(listed):
            why = " (one actor writes every role)" if one else ""
            raise ConfigError(Problem("args.num_agents", f"{self.args.num_actors}{why}, but {len(listed)} agents are given"))
        if one and agents is None and num_agents != self.args.num_agents:
            raise ConfigError(Problem("num_agents", f"{num_agents} contradicts args.num_agents = {self.args.num_agents}"))
        self.rollout = rollout if isinstance(rollout, RolloutConfig) else RolloutConfig(**(rollout or {}))
        model = ModelConfig.read(model_config)
        section = {
            "seed": seed, "report_to": report_to, "stall_timeout_s": stall_timeout_s,
            "checkpoint_interval": checkpoint_interval, "checkpoint_every_updates": checkpoint_every_updates,
            "checkpoint_total_limit": checkpoint_total_limit,
        }  # fmt: skip
        self._run = run = read_run(self.kind, run_dir, wandb_config, resume, section)
        self.run_dir = run.run_dir
        self._seed = run.seed_in(self.run_dir)
        self._resume, self._checkpoint_limit = resume, run.section.checkpoint_total_limit
        self._checkpoint_every = (run.section.checkpoint_interval, run.section.checkpoint_every_updates)
        self.display = Display((run.section.wandb is None or run.section.wandb.verbose) if verbose is None else verbose)
        self._copies = ModelCopies(self.run_dir)
        found = Findings()
        found.of(self.run_dir.check)
        self.lora: list[LoraSettings | None] = found.of(partial(read_lora, lora, len(listed))) or [None] * len(listed)
        listed, self.lora = found.of(partial(split_adapters, listed, self.lora)) or (listed, self.lora)
        if any(self.lora) and self.rollout.transport in ("nccl", "ipc"):
            found.add("rollout.transport", f"{self.rollout.transport!r} sends whole weights, and an agent has lora; write auto")
        content = found.of(partial(read_deepspeed, deepspeed))
        self._settings = EngineSettings(content or {}, model.dtype, model.attn_implementation, device_kind())
        self.placement = found.of(partial(read_placement, placement))
        layout = found.of(self._layout)
        plans = None
        if content is not None and layout is not None:
            plans = found.of(partial(plan_actors, self._settings, self.args, layout, self._other_roles()))
            found.of(
                partial(engine_places, self.rollout, layout, [""] * len(listed), self._settings.device, swaps=any(self.lora))
            )
        self._eval_user = found.of(partial(EvaluationUser.read, eval_logger, eval_aggregator)) or EvaluationUser()
        with self._copies:
            sources = found.of(partial(self._resolve, listed, tokenizer))
            setup = None
            if sources is not None:
                for i, (source, own) in enumerate(zip(sources, self.lora)):
                    found.of(partial(check_lora, source, Path(source), own, f"agents.{i}.lora"))
                    found.of(partial(check_head_size, self.rollout, self._settings.device, source, f"agents.{i}.model"))
                found.of(partial(adapter_room, self.rollout, self._settings.device, sources, self.lora, comparators=False))
                parts = (sources, tokenizer, formatters, reward_func, reward_processor, self.args, self.rollout)
                setup = found.of(partial(set_up_team, *parts, centralized_comparator_adapter))
            self.train_dataset: Any = found.of(partial(as_sequence, train_dataset, "train_dataset"))
            self.eval_dataset: Any = found.of(partial(as_sequence, eval_dataset, "eval_dataset"))
            for name, dataset in (("train_dataset", self.train_dataset), ("eval_dataset", self.eval_dataset)):
                if dataset is not None and setup is not None:
                    found.of(partial(setup.try_first_prompt, dataset, name))
            if setup is not None:
                found.of(partial(self._check_more, setup))
            found.raise_any()
            assert plans and setup and layout
            self.plans, self.setup, self.layout = plans, setup, layout
            self.run_dir.check_same(self._resolved_config())

    # --- evaluation and saving
    @conducted
    def evaluate(self, num_eval_samples: int | None = None) -> dict[str, float]:
        """Task reward of the current policies on the first tasks of `eval_dataset`; {} without one.

        The same policies and settings give the same samples: seeds depend on task, agent and sample only.
        """
        if self.eval_dataset is None:
            return {}
        started = time.perf_counter()
        builder = self.setup.prompt_builder()
        prompts = self._eval_prompts(num_eval_samples, builder)
        if text := overlong_text(builder):
            self.display.say(f"evaluation of {len(prompts)} tasks{text}")
        temperature = self.args.temperature if self.args.eval_temperature is None else self.args.eval_temperature
        sampling = Sampling(temperature, self.args.top_p, self.args.top_k)
        with self.display.bar("evaluating", len(prompts)) as bar:
            sampled = self._sampler().sample(
                prompts, self.session.policies(), sampling, stream=EVAL, round=0, candidates=self.args.eval_samples_per_item,
                progress=lambda items, tokens: bar.advance(items),
            )  # fmt: skip
        self.last_evaluation = evaluation = evaluation_of(sampled)
        write_samples(self.run_dir.samples / f"eval_{self.reporter.updates:06d}.json", sampled)
        metrics = {
            "eval/turn_1/reward_mean": evaluation.mean, "eval/turn_1/expected_return": evaluation.mean,
            "eval/standard_error": evaluation.standard_error, "eval/n": len(evaluation.items),
            "eval/dropped_prompts": len(builder.dropped), "eval/truncated_prompts": len(builder.truncated),
            "eval/seconds": time.perf_counter() - started,
        }  # fmt: skip
        return metrics | self._user_metrics(sampled)

    def _write_models(self, folder: Path) -> None:
        from comlrl_ds.engines.engine import PolicyEngine

        folders = [folder / agent_name(i) for i in range(self.args.num_actors)]
        self.cluster.run({r: call(PolicyEngine.save_pretrained, f) for r, f in zip(self.session.actors, folders)})
        for tokenizer, target in zip(self.setup.team.tokenizers, folders):
            tokenizer.save_pretrained(target)

    def _notes(self) -> list[str]:
        own = [*self._copies.notes, *([] if self.args.disable_dropout else [DROPOUT_NOTE])]
        return list(dict.fromkeys([*self.layout.notes, *(n for plan in self.plans.values() for n in plan.notes), *own]))

    @property
    def seed(self) -> int:
        """What everything random in the run follows from."""
        return self._seed.value

    # --- what runs
    def _new_reporter(self) -> Reporter:
        config, resumed = self._resolved_config(), self.run_dir.holds_run
        self.run_dir.create(config)
        self.run_dir.allow_resume()  # it is this trainer's own, also where what follows fails and is tried again
        trackers = self._run.start_trackers(self.run_dir, config, resumed=resumed, quiet=self.display.console.quiet)
        return Reporter(self.args, self.run_dir, self.display, trackers)

    def _new_session(self) -> Session:
        _ = self.reporter  # makes the run's folder
        text = "\n".join([*self.layout.lines(), *(f"note: {note}" for note in self._notes())]) + "\n"
        write_atomically(self.run_dir.path / "placement.txt", text.encode())
        self.cluster.arrange(self.layout, self._run.section.stall_timeout_s, self.run_dir.path)
        session = Session(
            self.cluster, self.setup.sources, self._settings, self.plans, self.args, self.rollout, self.run_dir.engine_log,
            *self._other_policies(), value_heads=self._value_heads(),
            adapters=[Adapter(s, seed_of(self.seed, "lora", i)) if s else None for i, s in enumerate(self.lora)],
            seed=self.seed, state=self.policy_state,
        )  # fmt: skip
        for line in (str(self._seed), *(f"note: {note}" for note in self._notes())):
            self.display.say(line)
        return session

    def _session_started(self, session: Session) -> None:
        if self.train_dataset is not None and self.policy_state.folder is None:
            _ = session.actors  # while engines start; what was kept is often looked at only

    # --- what subclasses add
    def _other_roles(self) -> Rates:
        """Roles besides actors and rollout: (units per optimizer step, learning rate)."""
        return {}

    def _check_more(self, setup: TeamSetup) -> None:
        """Raises ConfigError for what the subclass cannot work with."""

    def _other_policies(self) -> tuple[list[str], bool]:
        """(model folders of comparators that have their own, whether engines will be given weights from disk)."""
        return [], False

    def _value_heads(self) -> list[ValueHead]:
        """Heads of actors that are their own critics, one each; none elsewhere."""
        return []

    # --- parts
    def _layout(self) -> Layout:
        devices = {name: getattr(self.args, name, None) for name in FIELDS}
        actors = self.args.num_actors
        comparators = comparator_roles(self.placement, devices["comparator_devices"], actors)
        roles = [*map(actor_role, range(actors)), *self._other_roles(), *comparators]
        return resolve_placement(
            self.placement, self.cluster.slots(), agents=actors, roles=roles, devices=devices,
            device_kind=self._settings.device,
        )  # fmt: skip

    def _resolve(self, listed: list[Any], tokenizer: Any) -> list[str]:
        if tokenizer is None and any(map(is_model, listed)):
            raise ConfigError(Problem("tokenizer", "required when agents are model objects"))
        names = [agent_name(i) for i in range(len(listed))]
        return folders_of(listed, [f"agents.{i}.model" for i in range(len(listed))], names, self._copies)

    def _described_agents(self) -> list[dict[str, Any]]:
        return [
            {"model": s} | ({"lora": own.model_dump(exclude_defaults=True)} if own else {})
            for s, own in zip(self.setup.sources, self.lora)
        ]

    def _resolved_config(self) -> dict[str, Any]:
        return {
            "trainer": self.kind, "agents": self._described_agents(), "args": self.args.model_dump(),
            "deepspeed": self._settings.deepspeed, "dtype": self._settings.dtype, "rollout": self.rollout.model_dump(),
            "placement": self.placement.model_dump() if self.placement else None,
            "run": self._run.described(self.run_dir, self.seed),
        }  # fmt: skip

    def _eval_prompts(self, count: int | None, builder: PromptBuilder) -> list[JointPrompt]:
        count = self.args.eval_num_samples if count is None else count
        return builder.build_some(self.eval_dataset, range(min(count, len(self.eval_dataset))))

    def _sampling(self, keywords: Mapping[str, Any]) -> Sampling:
        unknown = [k for k in keywords if k not in (*GENERATION_KEYWORDS, "do_sample")]
        if unknown:
            raise ConfigError(Problem(f"train({unknown[0]}=…)", f"unknown; valid: {', '.join(GENERATION_KEYWORDS)}"))
        defaults = {"temperature": self.args.temperature, "top_p": self.args.top_p, "top_k": self.args.top_k}
        return Sampling(**(defaults | {k: v for k, v in keywords.items() if k != "do_sample"}))

    def _sampler(self) -> JointSampler:
        return JointSampler(
            self.session.pool(), self.setup.team, self.setup.oracle, run_seed=self.seed,
            oracle_on_error=self.args.oracle_on_error, chunk_items=self.args.collection_chunk_items,
            oracle_workers=self.args.oracle_workers,
        )  # fmt: skip

    def _evaluate_and_report(self, name: str) -> None:
        values = self.evaluate()
        self.reporter.evaluated_at = self.reporter.updates
        if not values.get("eval/n"):
            return
        self.evaluations.append((name, self.last_evaluation))
        self.reporter.syncs(self.session.syncs)
        self.reporter.evaluation(name, self.last_evaluation, values)

    def _report_logprob_gap(self, pairs: Sequence[PreferencePair], rows: int = 4) -> None:
        """How far trainer and engine disagree on some training rows, with the same weights."""
        gaps: list[float] = []
        pool, policies = self.session.pool(), self.session.policies()
        from comlrl_ds.engines.engine import PolicyEngine

        for i, role in enumerate(self.session.actors):
            texts = [[*p.tokens[i].prompt, *p.tokens[i].winner] for p in pairs[:rows]]
            trainer = self.cluster.run({role: call(PolicyEngine.token_logprobs, texts)})[role]
            both = zip(trainer, pool.prompt_logprobs(policies[agent_name(i)], texts))
            gaps += [abs(x - y) for ours, theirs in both for x, y in zip(ours, theirs)]
        self.reporter.syncs(self.session.syncs)
        self.reporter.log({"rollout/logprob_gap": math.fsum(gaps) / len(gaps)})

    def _user_metrics(self, sampled: Sequence[SampledItem]) -> dict[str, float]:
        """Metrics of the user's functions on an evaluation, under eval/."""
        return self._said(self._eval_user.metrics(sampled), "eval_aggregator")

    def _said(self, found: UserMetrics, what: str) -> dict[str, float]:
        """The user's metrics; the first time that names of theirs are the trainer's, a line says so."""
        if found.moved.keys() - self._moved:
            self.display.say(moved_line(found, what))
            self._moved |= found.moved.keys()
        return found.values
