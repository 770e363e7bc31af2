"""Settings of the iterative trainers: rounds, comparator, replay. Names, defaults and rules are the page's; else it says so."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, field_serializer

from comlrl_ds.config.api_settings import CREDENTIAL_NAME, HIDDEN, APISettings, Secret
from comlrl_ds.config.errors import ConfigError, Findings, Problem, Settings
from comlrl_ds.config.madpo import MADPOConfig, NonNegative, Positive, lowered
from comlrl_ds.config.replay import REPLAY_ALIASES, ReplaySettings

POLICY_ALIASES = {
    "self": "current", "online": "current",
    "copy": "current_copy", "online_copy": "current_copy", "current-offload": "current_copy",
    "current_offload": "current_copy",
    "external": "model", "comparator": "model", "reference": "model", "ref": "model",
    "checkpoint": "history", "previous": "history", "previous_iteration": "history",
    "http": "api", "endpoint": "api",
}  # fmt: skip
GENERATION_ALIASES = {
    "decentralised": "decentralized", "multi_agent": "decentralized", "multi-agent": "decentralized",
    "centralised": "centralized", "single_agent": "centralized", "single-agent": "centralized",
}  # fmt: skip
API = "comparator_api_"


def _secret(value: Any) -> Any:
    """Before anything can be printed: pydantic shows what it refuses."""
    if value is None or isinstance(value, Secret):
        return value
    if not isinstance(value, str):
        raise ConfigError(Problem("", "must be a text; better name the variable that holds it in comparator_api_key_env"))
    return Secret(value)


def _mapping(value: Any) -> Any:
    """As `_secret`."""
    if value is not None and not isinstance(value, dict):
        raise ConfigError(Problem("", f"must be a mapping, got {type(value).__name__}"))
    return value


def _headers(value: Any) -> Any:
    """Their values may be keys."""
    value = _mapping(value)
    return value and {name: Secret(text) if isinstance(text, str) else text for name, text in value.items()}


class IterativeSettings(Settings):
    """What the iterative trainers share."""

    num_iterations: Positive = Field(6, description="Rounds of collection and training.")
    log_reward_distribution: bool = Field(
        False, description="Write each round's distribution of raw rewards; needs reward_func.reward_range = (low, high)."
    )
    policy_checkpoint_dir: str | None = Field(
        None, description="Save every round's policies here; None: only what a comparator needs, below the run's folder."
    )
    keep_policy_checkpoints: bool | None = Field(
        None, description="Keep policies that no comparator needs any more; None: if policy_checkpoint_dir is set (addition)."
    )

    # --- replay
    preference_replay_mode: Annotated[
        Literal["current", "nearest_k", "all_history", "lambda_decay"], lowered(REPLAY_ALIASES)
    ] = Field("current", description="Rounds that a round trains on.")
    preference_replay_k: Any = Field(None, description="Rounds of nearest_k.")
    preference_replay_lambda: Any = Field(None, description="λ of lambda_decay, 0 to 1.")
    preference_replay_sample_size: Any = Field(
        None, description="Pairs that a historical mode draws; None: as many as the round has."
    )
    preference_replay_dir: str | None = Field(None, description="Folder of the round files; None: below the run's folder.")

    # --- comparator
    comparator_policy: Annotated[Literal["current", "current_copy", "model", "history", "api"], lowered(POLICY_ALIASES)] = (
        Field("current", description="Who gives the other side of each comparison.")
    )
    comparator_generation_mode: Annotated[Literal["decentralized", "centralized"], lowered(GENERATION_ALIASES)] = Field(
        "decentralized", description="centralized: one comparator writes every role's response."
    )
    comparator_centralized_agent_index: NonNegative = Field(0, description="Which agent's comparator that is.")
    comparator_model_name: str | None = Field(None, description="Model of every comparator.")
    comparator_agents: list[Any] | None = Field(None, description="Model of each comparator.")
    comparator_devices: str | list[str] | None = Field(None, description="Where local comparators sample; None: as the agents.")
    comparator_num_candidates: Positive | None = Field(None, description="None: preference_num_candidates.")
    comparator_history_k: Positive | None = Field(None, description="Rounds before the current policy; None: 1.")
    comparator_api_url: str | None = Field(None, description="Where requests are posted.", repr=False)
    comparator_api_format: str = Field("generic", description="generic, openai, anthropic or openai_responses.")
    comparator_api_model: str | None = Field(None, description="Sent as the model's name.")
    comparator_api_max_n_per_request: Any = Field(None, description="openai: answers of one request.")
    comparator_api_timeout: Any = Field(120.0, description="Seconds for one answer.")
    comparator_api_headers: Annotated[dict[str, Any] | None, BeforeValidator(_headers)] = Field(
        None, description="Sent with each request; written to no file.", exclude=True, repr=False
    )
    comparator_api_key: Annotated[Any, BeforeValidator(_secret)] = Field(
        None, description="The key; written to no file. Better: comparator_api_key_env.", exclude=True, repr=False
    )
    comparator_api_key_env: str | None = Field(None, description="Environment variable that holds the key.", repr=False)
    comparator_api_key_header: str = Field("Authorization", description="Header of the key.")
    comparator_api_key_prefix: str | None = Field("Bearer", description="Before the key.")
    comparator_api_response_field: str = Field("completions", description="generic: dotted path of the answers.")
    comparator_api_extra_body: Annotated[dict[str, Any] | None, BeforeValidator(_mapping)] = Field(
        None, description="Merged over the body.", repr=False
    )
    comparator_api_item_fields: Any = Field(None, description="generic: the task's fields that are sent; None: all (addition).")
    comparator_api_concurrency: Any = Field(16, description="Requests at a time (addition).")
    comparator_api_max_retries: Any = Field(5, description="Further tries of a request (addition).")
    comparator_api_backoff: Any = Field(1.0, description="Seconds before the first of them, doubled each time (addition).")
    comparator_api_max_wait: Any = Field(60.0, description="Longest wait between two tries in seconds (addition).")
    comparator_api_max_failure_fraction: Any = Field(0.1, description="Share of missing answers that ends the run (addition).")

    @property
    def replay(self) -> ReplaySettings:
        """The page's `preference_replay_*`."""
        names = ("mode", "k", "lambda", "sample_size")
        return ReplaySettings(*(getattr(self, f"preference_replay_{name}") for name in names))

    @property
    def api(self) -> APISettings:
        """The page's `comparator_api_*`."""
        names = [n.removeprefix(API) for n in IterativeSettings.model_fields if n.startswith(API)]
        values = {name: getattr(self, API + name) for name in names}
        headers = values["headers"] or {}
        values["headers"] = {n: v.reveal() if isinstance(v, Secret) else v for n, v in headers.items()} or None
        return APISettings(**values)

    @property
    def history_k(self) -> int:
        """Rounds between the current policy and the one it is compared with."""
        return self.comparator_history_k or 1

    @property
    def keeps_policies(self) -> bool:
        if self.keep_policy_checkpoints is None:
            return self.policy_checkpoint_dir is not None
        return self.keep_policy_checkpoints

    @property
    def saves_policies(self) -> bool:
        """Whether the policies are saved after each round."""
        return self.comparator_policy == "history" or self.policy_checkpoint_dir is not None or self.keeps_policies

    @field_serializer("comparator_agents")
    def _names_of_models(self, value: list[Any] | None) -> list[str] | None:
        return value and [v if isinstance(v, str) else type(v).__name__ for v in value]

    @field_serializer("comparator_api_url")
    def _url_without_query(self, value: str | None) -> str | None:
        return value and re.sub(r"\?.*", f"?{HIDDEN}", value)

    @field_serializer("comparator_api_extra_body")
    def _body_without_keys(self, value: Any) -> Any:
        return _without_keys(value)

    def __getstate__(self) -> dict[Any, Any]:
        """A copy in a file or message holds no key; `Secret`s empty themselves."""
        state = dict(super().__getstate__())
        hidden = {"url": self._url_without_query, "extra_body": _without_keys}
        state["__dict__"] = state["__dict__"] | {API + n: hide(state["__dict__"][API + n]) for n, hide in hidden.items()}
        return state

    def _problems(self) -> list[Problem]:
        found = Findings()
        found.of(lambda: self.replay)
        local = self.comparator_policy in ("current", "current_copy", "history")
        for name in ("comparator_model_name", "comparator_agents"):
            if local and getattr(self, name) is not None:
                found.add(name, f"comparator_policy {self.comparator_policy!r} takes none; drop it, or write 'model'")
        if self.comparator_policy == "model" and self.comparator_model_name is None and self.comparator_agents is None:
            found.add("comparator_model_name", "required with comparator_policy 'model' (or comparator_agents, one per agent)")
        if self.comparator_policy != "history" and self.comparator_history_k is not None:
            message = f"comparator_policy {self.comparator_policy!r} takes none; drop it, or write comparator_policy: history"
            found.add("comparator_history_k", message)
        if self.comparator_policy == "api":
            found.of(lambda: self.api)
        else:
            found.of(self._check_format)
        return found.problems

    def _check_format(self) -> None:
        """An unknown format, or a password in an address, is refused whatever the policy is."""
        APISettings(self.comparator_api_url or "http://localhost", self.comparator_api_format, model="any")


def _without_keys(value: Any, hide: bool = False) -> Any:
    """Texts under names of credentials are hidden, at any depth."""
    if isinstance(value, dict):
        return {k: _without_keys(v, hide or bool(CREDENTIAL_NAME.search(str(k)))) for k, v in value.items()}
    if isinstance(value, list):
        return [_without_keys(v, hide) for v in value]
    return HIDDEN if hide and isinstance(value, str) else value


class MADPOIterConfig(IterativeSettings, MADPOConfig):
    """Settings of `MADPOIterTrainer`: those of MADPO, with the defaults of the iterative trainers, and rounds."""

    preference_num_candidates: int = Field(20, ge=2, description="Responses that each agent samples per task and round.")
    preference_pairs_per_sample: Positive | None = Field(
        4, description="Pairs kept per task and round; None keeps all. Must be None with pair_selection 'all'."
    )
    pair_selection: Annotated[Literal["comparator_reward", "reward_gap", "all", "random"], lowered({})] = Field(  # type: ignore[assignment]
        "comparator_reward", description="comparator_reward: the comparator's highest scores first; else as in MADPO."
    )
    num_train_epochs: Positive = Field(1, description="Passes over a round's pairs.")

    def _problems(self) -> list[Problem]:
        found, agents = Findings(), self.num_agents
        found.problems += [*MADPOConfig._problems(self), *IterativeSettings._problems(self)]
        index = self.comparator_centralized_agent_index
        if self.compares_centralized and index >= self.num_actors:
            only = "0: one actor writes every role" if self.centralized else f"0 to {agents - 1}"
            found.add("comparator_centralized_agent_index", f"{index}: write {only}")
        if (listed := self.comparator_agents) is not None:
            allowed = {1, agents} if self.compares_centralized else {agents}
            if len(listed) not in allowed:
                wanted = " or ".join(map(str, sorted(allowed)))
                found.add("comparator_agents", f"a list of {len(listed)} for {agents} agents; give {wanted}")
            if self.comparator_model_name is not None and any(a != self.comparator_model_name for a in listed):
                found.add("comparator_agents", "contradicts comparator_model_name; give one of the two")
        devices = self.comparator_devices
        if isinstance(devices, list) and len(devices) not in (1, agents):
            found.add("comparator_devices", f"a list of {len(devices)} for {agents} agents; write one value or {agents}")
        return found.problems

    @property
    def compares_centralized(self) -> bool:
        """Whether one comparator writes every role; always so where one actor does."""
        return self.centralized or self.comparator_generation_mode == "centralized"

    @property
    def comparator_candidates(self) -> int:
        return self.comparator_num_candidates or self.preference_num_candidates
