"""Multi-Agent Direct Preference Optimization: policies learn directly from preferences between joint responses."""

from __future__ import annotations

import math
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from comlrl_ds.config.errors import ConfigError, Problem
from comlrl_ds.config.madpo import MADPOConfig
from comlrl_ds.config.run_file import RolloutConfig
from comlrl_ds.learners.madpo import MadpoLearner, NonFiniteError, StepReport
from comlrl_ds.maths.seeds import generator_of
from comlrl_ds.preference.collection import Collected, JointSampler, SampledItem, agent_name, pairs_from
from comlrl_ds.preference.evaluation import Evaluation, evaluation_of, write_samples
from comlrl_ds.preference.journal import Journal
from comlrl_ds.preference.records import PreferencePair, write_round
from comlrl_ds.rollout.base import Sampling
from comlrl_ds.runs.display import Display
from comlrl_ds.runs.metrics import Metrics, agent_metric, trackers_for
from comlrl_ds.runs.run_dir import RunDir
from comlrl_ds.trainers.preference.session import EngineSettings, Session, plan_actors
from comlrl_ds.trainers.preference.team import ModelConfig, read_agents, set_up_team

GENERATION_KEYWORDS = ("temperature", "top_p", "top_k", "min_new_tokens")


class MADPOTrainer:
    """Collects preference pairs once from the initial policies, then trains every agent on them.

    loss = −mean log σ(η Σ_i m_i), m_i the difference of agent i's log-probs of the winning and the losing response.
    The constructor checks everything and loads no model; `train` and `evaluate` start what they need.

    Args:
        agent_model: model source for all agents. agents: one source or model object per agent.
        num_agents: ignored when `agents` is given. tokenizer: one, or one per agent; None loads them from the sources.
        model_config: dtype and attn_implementation of the actors.
        train_dataset, eval_dataset: sequences of mappings.
        reward_func: the oracle (see `comlrl_ds.preference.oracle.Oracle`). reward_processor: maps each score.
        formatters: one, or one per agent: task → string or chat messages.
        external_transition: no effect at one turn.
        wandb_config: of it only the output folder and `config_sections.output.verbose` are used; see `report_to`.
        eval_logger, eval_aggregator: both together add metrics to an evaluation.
        args: the settings.
        rollout: how completions are sampled. deepspeed: a DeepSpeed file or dict for every actor.
        run_dir: where results go (default runs/madpo-<time>). seed: everything random follows from it.
        report_to: trackers beside metrics.jsonl: ["tensorboard"].
        verbose: print progress.

    Raises:
        ConfigError: a ValueError with every problem, before anything is loaded.
    """

    def __init__(
        self, agent_model: str | None = None, agents: Sequence[Any] | None = None, num_agents: int = 2, tokenizer: Any = None,
        model_config: Mapping[str, Any] | None = None, train_dataset: Any = None, eval_dataset: Any = None,
        reward_func: Callable[..., Any] | None = None, reward_processor: Callable[[float], float] | None = None,
        formatters: Any = None, external_transition: Any = None, wandb_config: Mapping[str, Any] | None = None,
        eval_logger: Callable[..., Any] | None = None, eval_aggregator: Callable[..., Any] | None = None,
        args: MADPOConfig | None = None, *, rollout: RolloutConfig | Mapping[str, Any] | None = None, deepspeed: Any = None,
        run_dir: str | Path | None = None, seed: int = 0, report_to: Sequence[str] = (), verbose: bool | None = None,
    ) -> None:  # fmt: skip
        from comlrl_ds.cluster.world import check_launch
        from comlrl_ds.engines.ds_config import read_deepspeed
        from comlrl_ds.engines.hardware import device_kind

        check_launch(__import__("os").environ)
        listed = read_agents(agent_model, agents, num_agents)
        self.args = args or MADPOConfig(num_agents=len(listed))
        if self.args.num_agents != len(listed):
            raise ConfigError(Problem("args.num_agents", f"{self.args.num_agents}, but {len(listed)} agents are given"))
        self.rollout = rollout if isinstance(rollout, RolloutConfig) else RolloutConfig(**(rollout or {}))
        self.seed = seed
        model = ModelConfig.read(model_config)
        output = _wandb_output(wandb_config)
        self.run_dir = RunDir(run_dir or output.get("dir") or Path("runs") / f"madpo-{datetime.now():%Y%m%d-%H%M%S}")
        self.run_dir.check()
        self.display = Display(output.get("verbose", True) if verbose is None else verbose)
        self._settings = EngineSettings(read_deepspeed(deepspeed), model.dtype, model.attn_implementation, device_kind())
        _check_devices(self.args, self._settings.device)
        plan_actors(self._settings, self.args)
        self._objects = listed if any(not isinstance(a, str) for a in listed) else None
        sources = self._resolve(listed, tokenizer)
        self.setup = set_up_team(sources, tokenizer, formatters, reward_func, reward_processor, self.args, self.rollout)
        self.train_dataset, self.eval_dataset = train_dataset, eval_dataset
        for name, dataset in (("train_dataset", train_dataset), ("eval_dataset", eval_dataset)):
            if dataset is not None:
                self.setup.try_first_prompt(dataset, name)
        if (eval_logger is None) != (eval_aggregator is None):
            raise ConfigError(Problem("eval_logger", "eval_logger and eval_aggregator go together; give both or none"))
        self._eval_user = (eval_logger, eval_aggregator)
        self._report_to = list(report_to)
        self._session: Session | None = None
        self._metrics: Metrics | None = None
        self.updates = self.env_step = self.nonfinite_steps = 0
        self.evaluations: list[tuple[str, Evaluation]] = []

    # --- the algorithm
    def train(self, **generation_kwargs: Any) -> None:
        """Collect, then learn. Without any non-tied pair nothing is trained, and the policies stay as they are.

        Args:
            generation_kwargs: temperature, top_p, top_k or min_new_tokens, for the collection.
        """
        if self.train_dataset is None:
            raise ConfigError(Problem("train_dataset", "required to train"))
        sampling = self._sampling(generation_kwargs)
        self._start()
        collected = self.collect_preferences(sampling)
        if not collected.pairs:
            self.display.say("no pair of different scores: nothing to learn from, the policies are unchanged")
            return
        self.train_on_pairs(collected.pairs)
        if self.eval_dataset is not None and self.args.eval_interval:
            self._evaluate_and_log("after")
        self._measure_logprob_gap(collected.pairs)
        self.save_model(self.run_dir.final)
        if self.evaluations:
            self.display.reward_table([self.evaluations[0], self.evaluations[-1]])
        self.display.say(f"weights, metrics and samples are in {self.run_dir.path}")

    def collect_preferences(self, sampling: Sampling, round: int = 1) -> Collected:
        """Joint responses to every task, their scores, and the pairs that are kept; on disk when this returns."""
        args, started = self.args, time.perf_counter()
        builder = self.setup.prompt_builder()
        prompts = builder.build(self.train_dataset)
        sampler = self._sampler()
        pool = self.session.pool()
        pool.generated_tokens, pool.generate_seconds = 0, 0.0
        with Journal(self.run_dir.journal) as journal, self.display.bar("collecting", len(prompts)) as bar:
            total = [0]

            def progress(items: int, tokens: int) -> None:
                total[0] += tokens
                bar.advance(items, f"{total[0] / (time.perf_counter() - started):.0f} tokens/s")

            sampled = sampler.sample(
                prompts, self.session.policies(), sampling, stream="target", round=round, candidates=args.preference_num_candidates,
                journal=journal, progress=progress,
            )  # fmt: skip
        collected = pairs_from(
            sampled, mode=args.pair_selection, cap=args.preference_pairs_per_sample, run_seed=self.seed, round=round,
            max_invalid_fraction=args.max_invalid_fraction,
        )  # fmt: skip
        write_round(self.run_dir.replay, round, collected.pairs, collected.sampled)
        rate = pool.generated_tokens / max(pool.generate_seconds, 1e-9)
        values = {
            "collect/pairs": len(collected.pairs), "collect/ties": collected.ties, "collect/invalid_scores": collected.invalid,
            "collect/oracle_errors": sampler.oracle_errors, "collect/reward_mean": collected.score_mean,
            "collect/empty_sides": sum(p.empty_sides for p in collected.pairs), "collect/dropped_prompts": builder.dropped,
            "collect/truncated_prompts": builder.truncated, "collect/seconds": time.perf_counter() - started,
            "rollout/tokens_per_s": rate,
        }  # fmt: skip
        for side in ("winner", "loser"):
            values |= {agent_metric(f"collect/{side}_tokens", i): n for i, n in enumerate(collected.lengths(side))}
        self._log(values)
        self.display.say(
            f"collected {len(sampled)} tasks × {args.preference_num_candidates} candidates in {values['collect/seconds']:.0f} s"
            f" ({rate:.0f} tokens/s): {len(collected.pairs)} pairs, {collected.ties} ties, {collected.invalid} invalid scores,"
            f" mean score {collected.score_mean:.3f}"
        )
        return collected

    def train_on_pairs(self, pairs: Sequence[PreferencePair], round: int = 1) -> None:
        """`num_train_epochs` passes over the pairs in seeded order, one joint step per batch."""
        args, actors = self.args, self.session.actors()
        learner = self._learner()
        steps = args.num_train_epochs * math.ceil(len(pairs) / args.batch_size)
        self.session.cluster.run({role: lambda a=a: a.start_schedule(self.updates + steps) for role, a in actors.items()})
        with self.display.bar("training", steps) as bar:
            for epoch in range(args.num_train_epochs):
                order = list(range(len(pairs)))
                generator_of(self.seed, "order", round, epoch).shuffle(order)
                for start in range(0, len(order), args.batch_size):
                    batch = order[start : start + args.batch_size]
                    if self.eval_dataset is not None and args.eval_interval and self.updates % args.eval_interval == 0:
                        self._evaluate_and_log(f"update {self.updates}" if self.evaluations else "before")
                    report = learner.step([pairs[k].tokens for k in batch])
                    self._after_step(report, [pairs[k] for k in batch], batch, round)
                    bar.advance(1, f"loss {report.loss:.4f}, margin {report.joint_margins.mean():.2f}")
        self.display.say(f"trained {self.updates} steps on {len(pairs)} pairs")

    def evaluate(self, num_eval_samples: int | None = None) -> dict[str, float]:
        """Task reward of the current policies on the first tasks of `eval_dataset`; {} without one.

        The same policies and settings give the same samples: seeds depend on task, agent and sample only.
        """
        if self.eval_dataset is None:
            return {}
        count = self.args.eval_num_samples if num_eval_samples is None else num_eval_samples
        started = time.perf_counter()
        builder = self.setup.prompt_builder()
        prompts = builder.build(self.eval_dataset, range(min(count, len(self.eval_dataset))))
        sampler = self._sampler()
        temperature = self.args.temperature if self.args.eval_temperature is None else self.args.eval_temperature
        sampling = Sampling(temperature, self.args.top_p, self.args.top_k)
        with self.display.bar("evaluating", len(prompts)) as bar:
            sampled = sampler.sample(
                prompts, self.session.policies(), sampling, stream="eval", round=0, candidates=self.args.eval_samples_per_item,
                progress=lambda items, tokens: bar.advance(items),
            )  # fmt: skip
        evaluation = evaluation_of(sampled)
        self.last_evaluation = evaluation
        write_samples(self.run_dir.samples / f"eval_{self.updates:06d}.json", sampled)
        metrics = {
            "eval/turn_1/reward_mean": evaluation.mean, "eval/turn_1/expected_return": evaluation.mean,
            "eval/standard_error": evaluation.standard_error, "eval/n": len(evaluation.items),
            "eval/seconds": time.perf_counter() - started,
        }  # fmt: skip
        return metrics | self._user_metrics(sampled)

    def save_model(self, folder: str | Path) -> None:
        """Writes agent_0, agent_1 … in Hugging Face layout, each with its tokenizer."""
        folder = Path(folder)
        actors = self.session.actors()
        calls = {
            role: lambda i=i, a=a: a.save_pretrained(folder / agent_name(i), self.setup.team.tokenizers[i])
            for i, (role, a) in enumerate(actors.items())
        }
        self.session.cluster.run(calls)

    # --- parts
    @property
    def session(self) -> Session:
        """The running parts, started on first use."""
        if self._session is None:
            self._start()
        assert self._session
        return self._session

    def close(self) -> None:
        """Ends the engines. Called when the trainer is collected or the program ends, too."""
        if self._session is not None:
            self._session.close()
            self._session = None
        if self._metrics is not None:
            self._metrics.close()
            self._metrics = None

    def __enter__(self) -> MADPOTrainer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _resolve(self, listed: list[Any], tokenizer: Any) -> list[str]:
        """A folder for every agent; a model object gets one under the run's folder when the run starts."""
        from comlrl_ds.engines.loading import local_folder

        if self._objects is None:
            return [local_folder(source, f"agents.{i}.model") for i, source in enumerate(listed)]
        if tokenizer is None:
            raise ConfigError(Problem("tokenizer", "required when agents are model objects"))
        folders = []
        for i, model in enumerate(listed):
            if isinstance(model, str):
                folders.append(local_folder(model, f"agents.{i}.model"))
                continue
            if not hasattr(model, "save_pretrained"):
                raise ConfigError(Problem(f"agents.{i}", f"{type(model).__name__} is neither a model source nor a transformers model"))
            folder = self.run_dir.sources / agent_name(i)
            model.save_pretrained(folder)
            folders.append(str(folder))
        return folders

    def _start(self) -> None:
        if self._session is not None:
            return
        self.run_dir.create(self._resolved_config())
        self._metrics = Metrics(self.run_dir.metrics, trackers_for(self._report_to, self.run_dir.path))
        self._session = Session(self.setup.sources, self._settings, self.args, self.rollout, self.run_dir.engine_log)
        weakref.finalize(self, self._session.close)
        for note in self._session.plan.notes:
            self.display.say(f"note: {note}")
        if self.train_dataset is not None:
            self._session.actors()

    def _resolved_config(self) -> dict[str, Any]:
        return {
            "trainer": "madpo", "agents": [{"model": s} for s in self.setup.sources], "args": self.args.model_dump(),
            "deepspeed": self._settings.deepspeed, "dtype": self._settings.dtype, "rollout": self.rollout.model_dump(),
            "run": {"dir": str(self.run_dir.path), "seed": self.seed, "report_to": self._report_to},
        }  # fmt: skip

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
        )  # fmt: skip

    def _learner(self) -> MadpoLearner:
        from comlrl_ds.engines.hardware import free_bytes

        return MadpoLearner(
            self.session.cluster, self.session.actors(), self.args.dpo_beta, score_last_token=self.args.scores_last_token,
            max_tokens=self.args.max_tokens_per_micro_batch, max_pairs=self.session.plan.max_pairs,
            margin_pass=self.args.margin_pass, free_bytes=lambda: free_bytes(self._settings.device),
        )  # fmt: skip

    def _after_step(self, report: StepReport, batch: Sequence[PreferencePair], numbers: Sequence[int], round: int) -> None:
        self.updates += 1
        previous = self.env_step
        if self.args.use_environment_step:
            self.env_step += self.args.environment_steps_per_pair * len(batch)
        reward = math.fsum(p.candidate_reward_mean for p in batch) / len(batch)
        values = {
            "train/loss": report.loss, "train/joint_margin": report.joint_margins.mean().item(),
            "train/accuracy": (report.joint_margins > 0).double().mean().item(), "train/step_s": report.seconds,
            "train/tokens_per_s": report.tokens / report.seconds, "train/micro_steps": report.micro_steps,
            "turn_1/reward_mean": reward, "turn_1/expected_return": reward,
        }  # fmt: skip
        for i in range(self.args.num_agents):
            values |= {
                agent_metric("train/margin", i): report.margins[i].mean().item(),
                agent_metric("train/winner_logprob", i): report.winner_logprobs[i],
                agent_metric("train/loser_logprob", i): report.loser_logprobs[i],
                agent_metric("train/grad_norm", i): report.grad_norms[i],
                agent_metric("train/lr", i): report.learning_rates[i],
            }  # fmt: skip
        if report.culprit is not None:
            self._count_nonfinite(report.culprit, numbers, batch, round)
        values["train/nonfinite_steps"] = self.nonfinite_steps
        self._log(values)
        if not self.args.use_environment_step or previous // self.args.logging_steps != self.env_step // self.args.logging_steps:
            assert self._metrics
            self._metrics.track(self.env_step, values)
            self.display.say(
                f"update {self.updates}: loss {report.loss:.4f}, joint margin {values['train/joint_margin']:+.3f},"
                f" accuracy {values['train/accuracy']:.2f}, {report.seconds:.1f} s"
            )

    def _count_nonfinite(
        self, culprit: tuple[int, int | None], numbers: Sequence[int], batch: Sequence[PreferencePair], round: int
    ) -> None:
        self.nonfinite_steps += 1
        agent, pair = culprit
        file = self.run_dir.replay / f"iteration_{round:04d}.json"
        listed = numbers if pair is None else [numbers[pair]]
        tasks = sorted({p.item for p in batch} if pair is None else {batch[pair].item})
        where = f"agent {agent}, pair {', '.join(map(str, listed))} of {file} (task {', '.join(map(str, tasks))})"
        what = "gradient" if pair is None else "log-probability"
        message = f"update {self.updates} skipped on every agent: non-finite {what} of {where}"
        self.display.say(message)
        if self.nonfinite_steps >= self.args.max_nonfinite_steps:
            raise NonFiniteError(f"{message}; {self.nonfinite_steps} such steps reach max_nonfinite_steps")

    def _evaluate_and_log(self, name: str) -> None:
        values = self.evaluate()
        if not values.get("eval/n"):
            return
        self.evaluations.append((name, self.last_evaluation))
        self._log_syncs()
        self._log(values)
        assert self._metrics
        self._metrics.track(self.env_step, values)
        self.display.say(
            f"evaluation {name}: mean reward {self.last_evaluation.mean:.3f} ± {self.last_evaluation.standard_error:.3f}"
            f" over {len(self.last_evaluation.items)} tasks, {values['eval/seconds']:.0f} s"
        )

    def _measure_logprob_gap(self, pairs: Sequence[PreferencePair], rows: int = 4) -> None:
        """Logs how far trainer and engine disagree on some training rows, with the same weights."""
        gaps: list[float] = []
        pool, policies = self.session.pool(), self.session.policies()
        for i, (_role, actor) in enumerate(self.session.actors().items()):
            texts = [[*p.tokens[i].prompt, *p.tokens[i].winner] for p in pairs[:rows]]
            pairs_of_rows = zip(actor.token_logprobs(texts), pool.prompt_logprobs(policies[agent_name(i)], texts))
            gaps += [abs(x - y) for a, b in pairs_of_rows for x, y in zip(a, b)]
        self._log_syncs()
        self._log({"rollout/logprob_gap": math.fsum(gaps) / len(gaps)})

    def _log_syncs(self) -> None:
        for report in self.session.syncs:
            self._log({"rollout/sync_s": report.seconds, "rollout/sync_bytes": report.bytes})
        self.session.syncs.clear()

    def _user_metrics(self, sampled: Sequence[SampledItem]) -> dict[str, float]:
        """Metrics of `eval_logger` and `eval_aggregator`, under eval/user/."""
        logger, aggregator = self._eval_user
        if logger is None or aggregator is None:
            return {}
        rows: list[Any] = []
        for s in sampled:
            turns = [[[text] for text in row] for row in s.texts]
            items, prompts = [s.joint.item] * len(turns[0]), [s.joint.item.get("prompt", "")] * len(turns[0])
            rows += logger(agent_completions_turns=turns, batch_items=items, prompts=prompts)
        return {f"eval/user/{k}": float(v) for k, v in aggregator(rows, num_turns=1).items()}

    def _log(self, values: Mapping[str, float]) -> None:
        assert self._metrics
        self._metrics.write(self.updates, self.env_step, values)


def _wandb_output(config: Mapping[str, Any] | None) -> dict[str, Any]:
    """The output folder and verbosity that the peer reads from its W&B settings."""
    if config is None:
        return {}
    output = (config.get("config_sections") or {}).get("output") or {}
    found = {"dir": config.get("output_dir") or output.get("base_dir") or config.get("dir"), "verbose": output.get("verbose")}
    return {k: v for k, v in found.items() if v is not None}


def _check_devices(args: MADPOConfig, device: str) -> None:
    """In one process every role is on one device; a device that this machine lacks, or several, cannot be meant."""
    named = args.agent_devices if isinstance(args.agent_devices, list) else [args.agent_devices]
    for name in named:
        if name in (None, "auto"):
            continue
        if not str(name).startswith(device):
            raise ConfigError(Problem("args.agent_devices", f"{name!r} is not on this machine, which computes on {device!r}"))
    if len(set(named)) > 1:
        raise ConfigError(Problem("args.agent_devices", f"{named}: one process uses one device; name one"))
