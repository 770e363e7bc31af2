"""Settings of MADPO. Names, defaults and rules are those of the Multi-LLM PbRL page; additions say so."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, field_validator, model_validator

from comlrl_ds.config.errors import ConfigError, Problem, Settings

Positive = Annotated[int, Field(ge=1)]
NonNegative = Annotated[int, Field(ge=0)]

DROPOUT_NOTE = (
    "dropout is on in training steps (args.disable_dropout: false), with masks that follow from run.seed;"
    " evaluations, KLs and values are without it"
)


def lowered(aliases: dict[str, str]) -> BeforeValidator:
    """Case and blanks do not matter, and each name may have others."""

    def read(value: Any) -> Any:
        if isinstance(value, str):
            value = value.strip().lower()
            return aliases.get(value, value)
        return value

    return BeforeValidator(read)


class MADPOConfig(Settings):
    """Settings of `MADPOTrainer`."""

    # --- the data: sampling, oracle, pairs
    num_agents: Positive = Field(2, description="Number of agents in the team.")
    preference_num_candidates: int = Field(80, ge=2, description="Responses that each agent samples per task.")
    preference_pairs_per_sample: Positive | None = Field(
        16, description="Pairs kept per task; None keeps all. Must be None with pair_selection 'all'."
    )
    pair_selection: Annotated[Literal["reward_gap", "all", "random"], lowered({})] = Field(
        "reward_gap", description="reward_gap: the largest score differences first; random: drawn; all: every pair."
    )
    max_new_tokens: Positive | list[Positive] = Field(
        256, description="Longest completion in tokens; a list gives each agent its own (addition)."
    )
    temperature: float = Field(0.6, gt=0, description="Sampling temperature.")
    top_p: float = Field(0.6, gt=0, le=1, description="Nucleus of the sampled distribution; 1 is off, and faster on a CPU.")
    top_k: Positive | None = Field(50, description="Tokens that may be sampled; None is off.")
    num_turns: int = Field(1, description="Must be 1: preference training has one turn.")
    joint_mode: Annotated[Literal["aligned"], lowered({"align": "aligned"})] = Field(
        "aligned", description="Responses with the same candidate index form a joint response."
    )
    collaboration_mode: Literal["decentralized", "centralized"] = Field(
        "decentralized", description="decentralized: one actor per agent; centralized: one actor writes every role."
    )
    overlong_prompt: Literal["error", "drop", "truncate_left"] = Field(
        "error",
        description="A prompt that leaves no room for its completion: end, drop the task, or cut its start (addition).",
    )
    oracle_on_error: Literal["raise", "invalid"] = Field(
        "raise", description="A reward function that raises: end the run, or count the score as invalid (addition)."
    )
    oracle_workers: Positive = Field(
        1, description="Tasks that are scored at a time, in threads: the reward function has to be safe for that (addition)."
    )
    max_invalid_fraction: float = Field(
        0.5, ge=0, le=1, description="Share of NaN or infinite scores of a round that ends the run (addition)."
    )
    collection_chunk_items: Positive | None = Field(
        None, description="Tasks sampled together; None: as many as make about 4096 requests (addition)."
    )

    # --- learning
    num_train_epochs: Positive = Field(20, description="Passes over the pairs.")
    agent_learning_rate: float = Field(5e-6, ge=0, description="AdamW learning rate of every actor.")
    dpo_beta: float = Field(0.1, gt=0, description="η of the MADPO loss.")
    train_batch_size: Positive | None = Field(None, description="Pairs per optimizer step; None: rollout_buffer_size.")
    rollout_buffer_size: Positive = Field(2, description="Default of train_batch_size.")
    max_grad_norm: float | None = Field(None, gt=0, description="Clips each actor's gradient norm; None does not (addition).")
    max_tokens_per_micro_batch: Positive = Field(
        2048, description="Padded tokens of one forward, for the worst agent; smaller needs less memory (addition)."
    )
    margin_pass: Literal["auto", "one_forward", "two_pass"] = Field(
        "auto",
        description="one_forward keeps each agent's graph while margins are exchanged; two_pass computes all margins of the"
        " batch first and holds one graph at a time; auto takes one_forward where the graphs fit (addition).",
    )
    row_layout: Literal["auto", "shared", "rows"] = Field(
        "auto",
        description="shared: completions share their prompt's row; rows: one row each; auto: what the model takes (addition).",
    )
    logprob_chunk: Positive = Field(512, description="Tokens that reach the vocabulary at once (addition).")
    gradient_checkpointing: bool = Field(False, description="Recompute activations in backward (addition).")
    score_last_token: bool | None = Field(
        None, description="Whether a completion's last token counts; None is the page's rule: only centralised (addition)."
    )
    disable_dropout: bool = Field(
        True, description="No dropout; off: models keep their rates in training steps, with masks from the seed (addition)."
    )
    train_agents: list[NonNegative] | None = Field(
        None, description="Agents that learn; the others stay as they are. None: all (addition)."
    )
    max_nonfinite_steps: Positive = Field(
        3, description="Steps skipped for a non-finite loss or gradient before the run ends (addition)."
    )

    # --- evaluation and metrics
    eval_interval: NonNegative = Field(16, description="Updates between evaluations; 0 never evaluates while training.")
    eval_num_samples: NonNegative = Field(4, description="Tasks per evaluation; 0 evaluates none.")
    eval_samples_per_item: Positive = Field(1, description="Joint responses per evaluated task (addition).")
    eval_batch_size: Positive = Field(1, description="Accepted for compatibility: evaluation is one batched submission.")
    eval_temperature: float | None = Field(None, ge=0, description="None: the sampling temperature; 0 is greedy (addition).")
    logging_steps: Positive = Field(
        50, description="Least distance, in environment steps, of printed and reported training lines."
    )
    use_environment_step: bool = Field(True, description="Advance the environment step while training.")
    environment_steps_per_pair: Positive = Field(2, description="Environment steps per trained pair.")

    # --- fields of the page without effect at one turn, in one process, or for MADPO
    parallel_training: Annotated[Literal["none", "mp"], lowered({"null": "none"})] = Field(
        "none", description="Accepted for compatibility: placement decides what runs side by side."
    )
    agent_devices: str | list[str] | None = Field(None, description="Devices of the actors: 'cpu', 'cuda:0', 'auto' or a list.")
    discount: float = Field(1.0, description="No effect at one turn.")
    early_termination_threshold: float | None = Field(None, description="No effect at one turn.")
    external_prompt_passthrough: bool = Field(False, description="No effect at one turn.")
    advantage_normalization: bool = Field(True, description="No effect in MADPO: it has no advantages.")
    advantage_mode: Literal["mean", "raw", "max", "rloo"] = Field("mean", description="No effect in MADPO.")
    reference_kl_enabled: bool = Field(False, description="No effect in MADPO: its objective is reference-free.")
    reference_kl_coef: float = Field(0.1, ge=0, description="No effect in MADPO.")
    reference_devices: str | list[str] | None = Field(None, description="No effect in MADPO.")

    @field_validator("num_turns")
    @classmethod
    def _one_turn(cls, value: int) -> int:
        if value != 1:
            raise ValueError(f"{value} is not supported; preference training needs num_turns: 1")
        return value

    @field_validator("pair_selection", "parallel_training", mode="before")
    @classmethod
    def _none_is_default(cls, value: Any, info: Any) -> Any:
        return cls.model_fields[info.field_name].default if value is None else value

    @model_validator(mode="after")
    def _settings_agree(self) -> MADPOConfig:
        if problems := self._problems():
            raise ConfigError(problems)
        return self

    def _problems(self) -> list[Problem]:
        """What contradicts what; subclasses add to it, so that one look shows all."""
        problems = []
        if self.pair_selection == "all" and self.preference_pairs_per_sample is not None:
            message = f"{self.preference_pairs_per_sample} contradicts pair_selection 'all'; write null"
            problems.append(Problem("preference_pairs_per_sample", message))
        actors = self.num_actors
        for name in ("max_new_tokens", "agent_devices", "reference_devices"):
            value = getattr(self, name)
            allowed = (actors,) if name == "max_new_tokens" else (1, actors)
            if isinstance(value, list) and len(value) not in allowed:
                one = "the one actor of collaboration_mode 'centralized'" if self.centralized else f"{actors} agents"
                problems.append(Problem(name, f"a list of {len(value)} for {one}; write one value or {actors}"))
        if self.train_agents is not None:
            if not self.train_agents:
                problems.append(Problem("train_agents", "empty: nobody would learn; list some agents, or write null for all"))
            elif max(self.train_agents) >= actors:
                message = f"{self.train_agents}: the agents are 0 to {actors - 1}"
                problems.append(Problem("train_agents", message))
        return problems

    @property
    def centralized(self) -> bool:
        """Whether one actor writes every role."""
        return self.collaboration_mode == "centralized"

    @property
    def num_actors(self) -> int:
        """Policies that are trained: one per agent, or one for all roles."""
        return 1 if self.centralized else self.num_agents

    def learns(self, actor: int) -> bool:
        """Whether an actor is trained."""
        return self.train_agents is None or actor in self.train_agents

    @property
    def batch_size(self) -> int:
        """Pairs per optimizer step."""
        return self.train_batch_size or self.rollout_buffer_size

    @property
    def token_limits(self) -> list[int]:
        """Longest completion of each actor, in tokens."""
        limit = self.max_new_tokens
        return list(limit) if isinstance(limit, list) else [limit] * self.num_actors

    @property
    def scores_last_token(self) -> bool:
        """The page's decentralised scorer leaves the last completion token out, its centralised one counts every token."""
        return self.centralized if self.score_last_token is None else self.score_last_token
