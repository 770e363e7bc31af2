"""Who writes a joint response: one writer per agent, or one for all roles."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

from comlrl_ds.preference.centralized import CentralizedComparatorAdapter, parse_joint
from comlrl_ds.preference.prompts import JointPrompt
from comlrl_ds.rollout.base import Completion


def agent_name(agent: int) -> str:
    """Name of an agent's policy."""
    return f"agent_{agent}"


@dataclass(frozen=True)
class Read:
    """Candidates as texts: `written` [writer][candidate], `texts` [role][candidate], and candidates that hold no answer."""

    written: list[list[str]]
    texts: list[list[str]]
    missing: frozenset[int] = frozenset()


@dataclass(frozen=True)
class Team:
    """What sampling has to know of the writers, one entry each. Here each writes one role's response.

    Attributes:
        names: policy of each writer; None: agent_0, agent_1 …
    """

    tokenizers: Sequence[Any]
    token_limits: Sequence[int]
    stop_ids: Sequence[tuple[int, ...]]
    names: Sequence[str] | None = None

    @property
    def size(self) -> int:
        return len(self.tokenizers)

    def name(self, writer: int) -> str:
        """Policy of a writer."""
        return self.names[writer] if self.names else agent_name(writer)

    def read(self, joint: JointPrompt, completions: Sequence[Sequence[Completion]]) -> Read:
        """Texts of completions, [writer][candidate], without special tokens."""
        texts = [
            [tokenizer.decode(list(c.ids), skip_special_tokens=True) for c in row]
            for tokenizer, row in zip(self.tokenizers, completions)
        ]
        return Read(texts, texts)


@dataclass(frozen=True)
class JointTeam(Team):
    """One writer whose answers hold every role's response.

    Attributes:
        roles: how many. adapter: takes an answer apart.
        keep_unparsed: an answer without any section is n empty responses (a policy that learns has to learn the form), else
            it is no answer.
        failures: answers without any section so far.
    """

    roles: int = 0
    adapter: CentralizedComparatorAdapter | None = None
    keep_unparsed: bool = False
    failures: list[int] = field(default_factory=lambda: [0])

    def read(self, joint: JointPrompt, completions: Sequence[Sequence[Completion]]) -> Read:
        return self.read_texts(joint, Team.read(self, joint, completions).written)

    def read_texts(self, joint: JointPrompt, written: list[list[str]], lost: Collection[int] = ()) -> Read:
        """The same of answers as texts, without the `lost` candidates."""
        assert self.adapter
        parsed, missing = list[list[str]](), set(lost)
        for j, text in enumerate(written[0]):
            if j in missing:
                parsed.append([""] * self.roles)
                continue
            sections = parse_joint(self.adapter, text, joint.item, self.roles, f"task {joint.index}")
            if sections is None:
                self.failures[0] += 1
                if not self.keep_unparsed:
                    missing.add(j)
            parsed.append(sections or [""] * self.roles)
        return Read(written, [list(row) for row in zip(*parsed)], frozenset(missing))
