"""Who writes a joint response: one writer per agent, or one for all roles."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

from comlrl_ds.preference.centralized import CentralizedComparatorAdapter, parse_joint
from comlrl_ds.preference.prompts import JointPrompt
from comlrl_ds.preference.tokenizing import answer_ids, completion_text
from comlrl_ds.rollout.base import Completion


def agent_name(agent: int) -> str:
    """Name of an agent's policy."""
    return f"agent_{agent}"


@dataclass(frozen=True)
class Read:
    """Candidates as texts.

    Attributes:
        written: [writer][candidate]. texts: [role][candidate]. missing: candidates that hold no answer.
        completions: in the tokens of the agents, [agent][candidate], where another tokenizer or a server wrote the texts.
        cut: answers that were longer than the agents' may be. unfinished: answers whose writer ran into a limit of its own.
    """

    written: list[list[str]]
    texts: list[list[str]]
    missing: frozenset[int] = frozenset()
    completions: list[list[Completion]] | None = None
    cut: int = 0
    unfinished: int = 0


@dataclass(frozen=True)
class AgentTokens:
    """Turns texts that others wrote into what the agents could have sampled: their token ids, within their limits.

    A completion of an agent has at most `max_new_tokens` tokens, the stop token included, and ends with a stop token unless
    it reached that limit. A finished text ends with the agent's stop token where both fit; otherwise the ids and the text
    are cut, before anybody scores or trains on them.

    Args:
        tokenizers, limits, stop_ids: of each agent, as in its `Team`.
    """

    tokenizers: Sequence[Any]
    limits: Sequence[int]
    stop_ids: Sequence[tuple[int, ...]]

    def take(
        self, texts: Sequence[Sequence[str]], finished: Sequence[Sequence[bool]]
    ) -> tuple[list[list[str]], list[list[Completion]], int]:
        """(texts, completions, answers that were cut), each [agent][candidate].

        Args:
            finished: whether the writer ended an answer itself.
        """
        kept, completions, cut = list[list[str]](), list[list[Completion]](), 0
        for i, (row, ends) in enumerate(zip(texts, finished)):
            kept.append([])
            completions.append([])
            for text, end in zip(row, ends):
                ids, limit = self._ids(i, text, end), self.limits[i]
                if is_cut := len(ids) > limit:
                    ids = ids[:limit]
                    text = completion_text(self.tokenizers[i], ids, finished=False)
                    cut += 1
                kept[-1].append(text)
                completions[-1].append(Completion(ids, "stop" if end and not is_cut else "length", "text"))
        return kept, completions, cut

    def _ids(self, agent: int, text: str, finished: bool) -> tuple[int, ...]:
        tokenizer = self.tokenizers[agent]
        stop = _end_of(tokenizer, self.stop_ids[agent])
        ids = tuple(answer_ids(tokenizer, text)) if text else ()
        if finished and ids[-1:] != stop:
            ids += stop
        # An answer of no token at all cannot be stored; its stop token, or any, stands for it.
        return ids or stop or (0,)


def _end_of(tokenizer: Any, stop_ids: Sequence[int]) -> tuple[int, ...]:
    """The token with which a writer ends its answers: of several that stop it the tokenizer's own."""
    return (tokenizer.eos_token_id,) if tokenizer.eos_token_id in stop_ids else tuple(stop_ids[:1])


@dataclass(frozen=True)
class Team:
    """What sampling has to know of the writers, one entry each. Here each writes one role's response.

    Attributes:
        names: policy of each writer; None: agent_0, agent_1 …
        agents: makes the agents' completions of what these writers write, where their tokens are others; None elsewhere.
    """

    tokenizers: Sequence[Any]
    token_limits: Sequence[int]
    stop_ids: Sequence[tuple[int, ...]]
    names: Sequence[str] | None = None
    agents: AgentTokens | None = None

    @property
    def size(self) -> int:
        return len(self.tokenizers)

    def name(self, writer: int) -> str:
        """Policy of a writer."""
        return self.names[writer] if self.names else agent_name(writer)

    def read(self, joint: JointPrompt, completions: Sequence[Sequence[Completion]]) -> Read:
        """Texts of completions, [writer][candidate], without the stop tokens that ended them."""
        texts = [
            [completion_text(tokenizer, c.ids, c.finish_reason == "stop") for c in row]
            for tokenizer, row in zip(self.tokenizers, completions)
        ]
        return self.read_texts(joint, texts, [[c.finish_reason == "stop" for c in row] for row in completions])

    def read_texts(
        self, joint: JointPrompt, written: list[list[str]], finished: Sequence[Sequence[bool]], lost: Collection[int] = ()
    ) -> Read:
        """The same of answers as texts, [writer][candidate], without the `lost` candidates."""
        completions, cut = None, 0
        if self.agents is not None:
            written, completions, cut = self.agents.take(written, finished)
        return Read(written, written, frozenset(lost), completions, cut, _unfinished(finished))


@dataclass(frozen=True)
class JointTeam(Team):
    """One writer whose answers hold every role's response.

    Attributes:
        roles: how many. adapter: takes an answer apart.
        keep_unparsed: an answer without any section is n empty responses (a policy that learns has to learn the form), else
            it is no answer.
        whole: the agents have one writer, too, so that its completion is the whole answer and not a role's section.
        failures: answers without any section so far.
    """

    roles: int = 0
    adapter: CentralizedComparatorAdapter | None = None
    keep_unparsed: bool = False
    whole: bool = False
    failures: list[int] = field(default_factory=lambda: [0])

    def read_texts(
        self, joint: JointPrompt, written: list[list[str]], finished: Sequence[Sequence[bool]], lost: Collection[int] = ()
    ) -> Read:
        assert self.adapter
        completions, cut = None, 0
        if self.agents is not None and self.whole:  # what the agents' one writer could have written is what is parsed
            written, completions, cut = self.agents.take(written, finished)
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
        texts = [list(row) for row in zip(*parsed)]
        if self.agents is not None and not self.whole:
            # A section that was found has its end, so it is a finished response of its role.
            texts, completions, cut = self.agents.take(texts, [[True] * len(parsed)] * self.roles)
        return Read(written, texts, frozenset(missing), completions, cut, _unfinished(finished))


def _unfinished(finished: Sequence[Sequence[bool]]) -> int:
    return sum(not end for row in finished for end in row)
