"""The `lora` section: low-rank adapters in place of full weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from pydantic import Field, model_validator

from comlrl_ds.config.errors import ConfigError, Problem, Settings
from comlrl_ds.config.madpo import Positive


class LoraSettings(Settings):
    """W = W₀ + scaling · B A with W₀ frozen, A [r, in] and B [out, r]; scaling = lora_alpha / r, or / √r with use_rslora.

    The fields are those of peft's `LoraConfig`, with its defaults but for `target_modules`.
    """

    r: Positive = Field(8, description="Rank.")
    lora_alpha: float = Field(8, gt=0, description="Weight of the adapter.")
    lora_dropout: float = Field(0.0, ge=0, lt=1, description="Dropout before A; args.disable_dropout sets it to 0.")
    target_modules: str | list[str] = Field(
        "all-linear", description="Ends of names of linear layers, a regular expression, or all-linear: all but the head."
    )
    exclude_modules: str | list[str] | None = Field(None, description="Layers that get none, written likewise.")
    layers_to_transform: int | list[int] | None = Field(None, description="Only in these blocks, by number.")
    rank_pattern: dict[str, Positive] = Field(default_factory=dict, description="Other ranks, by layer name or expression.")
    alpha_pattern: dict[str, float] = Field(default_factory=dict, description="Other lora_alpha, likewise.")
    use_rslora: bool = Field(False, description="Scale with √r.")
    init_lora_weights: bool | Literal["gaussian"] = Field(True, description="How A starts; B starts with 0.")
    adapter: str | None = Field(None, description="A PEFT folder to start from, whose own settings hold (addition).")

    @model_validator(mode="after")
    def _alone(self) -> LoraSettings:
        others = sorted(self.model_fields_set - {"adapter"})
        if self.adapter is not None and others:
            problem = Problem(others[0], f"comes from the adapter {self.adapter!r}; leave it out, or the adapter")
            raise ConfigError(problem)
        if isinstance(self.target_modules, str) and self.layers_to_transform is not None:  # peft refuses it
            message = f"goes with a list in target_modules, not with {self.target_modules!r}"
            raise ConfigError(Problem("layers_to_transform", message))
        return self

    @property
    def peft_fields(self) -> dict[str, Any]:
        """The arguments of peft's `LoraConfig`."""
        return self.model_dump(exclude={"adapter"})


def read_lora(value: Any, agents: int, path: str = "lora") -> list[LoraSettings | None]:
    """The settings of each agent, from one for all or a list.

    Raises:
        ConfigError: for anything else.
    """
    listed = list(value) if isinstance(value, Sequence) and not isinstance(value, str) else [value] * agents
    if len(listed) != agents:
        raise ConfigError(Problem(path, f"{len(listed)} entries for {agents} agents; give one, or {agents}"))
    found: list[LoraSettings | None] = []
    for i, one in enumerate(listed):
        where = f"{path}.{i}" if isinstance(value, Sequence) else path
        if one is None or isinstance(one, LoraSettings):
            found.append(one)
        elif isinstance(one, Mapping):
            try:
                found.append(LoraSettings(**one))
            except ConfigError as error:
                raise error.under(where) from None
        else:
            raise ConfigError(Problem(where, f"{one!r}: write a mapping such as {{r: 16}}, or leave it out"))
    return found
