"""Settings of MARLHF: reward fit and policy learning. Names, defaults and rules are those of the page; additions say so."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from comlrl_ds.config.errors import Problem
from comlrl_ds.config.iterative import MADPOIterConfig
from comlrl_ds.config.lora import LoraSettings
from comlrl_ds.config.madpo import MADPOConfig, Positive, lowered

AdvantageMode = Literal["mean", "raw", "max", "rloo"]

ADVANTAGE_MODES: dict[str, AdvantageMode] = {"magrpo": "mean", "mareinforce": "raw", "maremax": "max", "marloo": "rloo"}
# Normalising cancels shift and scale, which is all that tells the other three from magrpo.
NORMALIZED = ("magrpo", "maac", "iac")
SCORING_ALIASES = {
    "oracle": "task", "environment": "task", "env": "task",
    "model": "reward_model", "learned": "reward_model",
}  # fmt: skip


class MARLHFConfig(MADPOConfig):
    """Settings of `MARLHFTrainer`: those of MADPO for the data, and those of the reward fit and of policy learning."""

    # --- reward fit
    reward_model_name: str | None = Field(None, description="Backbone of the reward model; None: the actors' model.")
    reward_model_device: str | None = Field(None, description="Where the reward model sits; None or 'auto': placement decides.")
    reward_learning_rate: float = Field(1e-5, gt=0, description="AdamW learning rate of the reward model.")
    reward_num_train_epochs: Positive = Field(1, description="Passes over the pairs in the reward fit.")
    reward_train_batch_size: Positive = Field(1, description="Pairs per optimizer step of the reward fit.")
    reward_max_length: Positive | None = Field(
        None, description="Longest joint text in tokens; None: what the reward model takes."
    )
    reward_freeze_backbone: bool = Field(False, description="Train only the scalar head of the reward model.")
    reward_lora: LoraSettings | None = Field(None, description="An adapter learns in place of the backbone (addition).")
    reward_eval_fraction: float = Field(
        0.1, ge=0, lt=1, description="Share of the tasks whose pairs only measure the reward fit; 0 holds none out (addition)."
    )

    # --- policy learning
    rl_algorithm: Annotated[
        Literal["magrpo", "mareinforce", "maremax", "marloo", "maac", "iac"], lowered({"mareforce": "mareinforce"})
    ] = Field("magrpo", description="What each agent's return is compared with.")
    num_generations: Positive = Field(4, description="G, joint responses per task; at least 2 without a critic.")
    num_train_epochs: Positive = Field(20, description="Passes of policy learning over the tasks.")
    rollout_buffer_size: Positive = Field(2, description="Tasks per update; joint responses with maac and iac.")
    train_batch_size: Positive | None = Field(
        None, description="Tasks per optimizer step, joint responses with maac and iac; None: rollout_buffer_size."
    )
    advantage_normalization: bool | None = Field(  # type: ignore[assignment]
        None,
        description="Advantages of mean 0 and deviation 1: within a task, or with maac and iac within a buffer. None: on for"
        " magrpo, maac and iac, off for the others, whose baselines it would make equal.",
    )
    advantage_mode: AdvantageMode = Field("mean", description="Set by rl_algorithm, whatever is written.")
    importance_correction: Annotated[Literal["none", "truncated"], lowered({"null": "none"})] = Field(
        "none",
        description="truncated: tokens count min(p_trainer / p_engine, importance_clip) times, both at temperature 1 and over"
        " the whole vocabulary; corrects for the engine's rounding and for later steps on a buffer (addition).",
    )
    importance_clip: float = Field(2.0, gt=0, description="Largest weight of importance_correction (addition).")
    reference_kl_enabled: bool = Field(False, description="Subtract a KL from each agent's reward; anchor: its first policy.")
    reference_kl_coef: float = Field(0.1, ge=0, description="Weight of that KL.")
    reference_devices: str | list[str] | None = Field(None, description="Where the frozen references sit.")

    # --- critics, of maac and iac
    critic_model_name: str | None = Field(None, description="Backbone of the critics; None: the actors' model.")
    critic_learning_rate: float | None = Field(
        None, gt=0, description="AdamW learning rate of the critics; None: agent_learning_rate."
    )
    critic_devices: str | list[str] | None = Field(None, description="Where the critics sit; maac has one, iac one per agent.")
    use_separate_critic: bool = Field(True, description="iac: critics of their own, or else a value head on each actor.")
    critic_type: Literal["v", "q"] = Field("v", description="v: the critic reads prompts; q: prompts and responses.")
    value_loss_coef: float = Field(0.6, gt=0, description="Weight of the value loss.")
    value_clip_range: float | None = Field(
        0.2, gt=0, description="iac with value heads: distance from the old value that lowers the loss; None: any."
    )
    critic_value_head_hidden_dim: Positive | None = Field(
        None, description="Width of a hidden layer in the critics' value heads; None: none."
    )
    critic_lora: LoraSettings | None = Field(None, description="Adapters learn in place of critics' backbones (addition).")
    value_head_hidden_dim: Positive | None = Field(None, description="The same for value heads on actors.")

    # --- settings of MADPO's loss
    dpo_beta: float = Field(0.1, gt=0, description="No effect in MARLHF.")
    margin_pass: Literal["auto", "one_forward", "two_pass"] = Field("auto", description="No effect in MARLHF.")
    environment_steps_per_pair: Positive = Field(2, description="No effect in MARLHF: a joint response is one step.")
    score_last_token: bool | None = Field(None, description="No effect in MARLHF: every token of a completion counts.")

    @field_validator("rl_algorithm", "importance_correction", mode="before")
    @classmethod
    def _none_is_first(cls, value: Any, info: Any) -> Any:
        return cls.model_fields[info.field_name].default if value is None else value

    @model_validator(mode="after")
    def _mode_of_algorithm(self) -> MARLHFConfig:
        if self.advantage_mode_of:
            # Not by assignment, which would validate again, and so on.
            self.__dict__["advantage_mode"] = self.advantage_mode_of
        return self

    def _problems(self) -> list[Problem]:
        return [*MADPOConfig._problems(self), *self._learning_problems()]

    def _learning_problems(self) -> list[Problem]:
        problems = []
        if self.reinforce and self.num_generations < 2:
            message = f"{self.num_generations}: {self.rl_algorithm} compares the responses to a task; write at least 2"
            problems.append(Problem("num_generations", message))
        if self.reward_freeze_backbone and self.reward_lora:
            problems.append(
                Problem("reward_lora", "given, but reward_freeze_backbone trains the head alone; write one of the two")
            )
        devices, actors = self.critic_devices, self.num_actors
        if isinstance(devices, list) and self.rl_algorithm == "maac" and len(devices) != 1:
            problems.append(Problem("critic_devices", f"a list of {len(devices)} for the one critic of maac; write one value"))
        elif isinstance(devices, list) and len(devices) not in (1, actors):
            message = f"a list of {len(devices)} for {actors} actor{'s' * (actors > 1)}; write one value or {actors}"
            problems.append(Problem("critic_devices", message))
        return problems

    @property
    def reinforce(self) -> bool:
        """Whether the backend is one of the four without a critic."""
        return self.rl_algorithm in ADVANTAGE_MODES

    @property
    def value_heads(self) -> bool:
        """Whether actors are their own critics."""
        return self.rl_algorithm == "iac" and not self.use_separate_critic

    @property
    def critic_roles(self) -> list[str]:
        """Roles of the critics that are models of their own."""
        if self.reinforce or self.value_heads:
            return []
        return ["critic"] if self.rl_algorithm == "maac" else [f"critic.{i}" for i in range(self.num_actors)]

    @property
    def advantage_mode_of(self) -> AdvantageMode | None:
        """The baseline of the backend, as `maths.advantages` names it; None where a critic gives it (maac, iac)."""
        return ADVANTAGE_MODES.get(self.rl_algorithm)

    @property
    def normalizes(self) -> bool:
        """Whether advantages are normalised."""
        return self.rl_algorithm in NORMALIZED if self.advantage_normalization is None else self.advantage_normalization

    @property
    def critic_rate(self) -> float:
        """AdamW learning rate of the critics."""
        return self.agent_learning_rate if self.critic_learning_rate is None else self.critic_learning_rate

    @property
    def scores_last_token(self) -> bool:
        """Always: a policy gradient that left out the last token would never learn when to stop."""
        return True


class MARLHFIterConfig(MARLHFConfig, MADPOIterConfig):
    """Settings of `MARLHFIterTrainer`: those of MARLHF, with the defaults of the iterative trainers, and rounds.

    It is a `MADPOIterConfig`, too: collection, comparator and replay are the same for both algorithms.
    """

    # pydantic takes all fields of the first base, MADPO's defaults included, so those of the rounds stand here again.
    preference_num_candidates: int = Field(20, ge=2, description="Responses that each agent samples per task and round.")
    preference_pairs_per_sample: Positive | None = Field(
        4, description="Pairs kept per task and round; None keeps all. Must be None with pair_selection 'all'."
    )
    pair_selection: Annotated[Literal["comparator_reward", "reward_gap", "all", "random"], lowered({})] = Field(  # type: ignore[assignment]
        "comparator_reward", description="comparator_reward: the comparator's highest scores first; else as in MADPO."
    )
    num_train_epochs: Positive = Field(2, description="Passes of a round's policy learning over the tasks.")
    reward_num_train_epochs: Positive = Field(2, description="Passes over a round's pairs in the reward fit.")
    preference_scoring_reward: Annotated[Literal["task", "reward_model"], lowered(SCORING_ALIASES)] = Field(
        "task", description="Oracle of new comparisons: the task reward, or the newest reward model once there is one."
    )

    def _problems(self) -> list[Problem]:
        return [*MADPOIterConfig._problems(self), *self._learning_problems()]
