"""One text for a whole joint response: what the reward model and a central critic read."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from comlrl_ds.preference.tokenizing import controls_in, open_ids

# Stands where a response is cut for tokenising: private characters that no text has in this order.
CUT = "\ue000\ue001\ue000"
TITLE = "Joint response of a team of agents to one task."


def reward_text(prompts: Sequence[str], responses: Sequence[str]) -> str:
    """A title, then each agent's prompt and response, numbered from 1; blocks are joined by an empty line."""
    blocks = [TITLE]
    for k, (prompt, response) in enumerate(zip(prompts, responses, strict=True), 1):
        blocks += [f"Agent {k} prompt:\n{prompt}", f"Agent {k} response:\n{response}"]
    return "\n\n".join(blocks)


def prompts_text(prompts: Sequence[str], responses: Sequence[str]) -> str:
    """What a central v-critic values: `critic_text` without responses."""
    return critic_text(prompts)


def critic_text(prompts: Sequence[str], responses: Sequence[str] | None = None) -> str:
    """What the central critic values: every agent's prompt, and of a q-critic every response, too."""
    blocks = [f"[Agent {i}] {prompt}" for i, prompt in enumerate(prompts)]
    if responses is not None:
        blocks.append("[Joint action]")
        blocks += [f"[Agent {i} action]\n{response}" for i, response in enumerate(responses)]
    return "\n\n".join(blocks)


@dataclass
class JointText:
    """Tokenises joint texts, of at most `max_length` tokens.

    Too long a text loses the starts of its prompts first, the longest ones most; only where no prompt is left responses
    lose their ends, and with these perhaps what told a winner from a loser.

    Attributes:
        form: makes the text of all prompts and responses.
        cut: texts that were cut so far. cut_responses: of them those whose responses were.
    """

    tokenizer: Any
    max_length: int | None = None
    form: Callable[[Sequence[str], Sequence[str]], str] = reward_text
    cut: int = field(default=0)
    cut_responses: int = field(default=0)

    def ids(self, prompts: Sequence[str], responses: Sequence[str]) -> tuple[int, ...]:
        """Token ids of a joint response's text."""
        whole = self._encode(prompts, responses)
        if self.max_length is None or len(whole) <= self.max_length:
            return whole
        self.cut += 1
        parts = [self._plain(p) for p in prompts]
        room = sum(map(len, parts))
        # Tokens join differently at other ends, so what is left is counted again.
        for _ in range(8):
            excess = len(whole) - self.max_length
            if excess <= 0:
                return whole
            room = max(0, sum(map(len, parts)) - excess)
            parts = shortened(parts, room)
            whole = self._encode([self._text(p) for p in parts], responses)
            if not room:
                break
        if len(whole) <= self.max_length:
            return whole
        self.cut_responses += 1
        ends = [self._plain(r) for r in responses]
        for _ in range(8):
            excess = len(whole) - self.max_length
            if excess <= 0:
                return whole
            if not any(ends):
                break
            ends = [part[: len(kept)] for part, kept in zip(ends, shortened(ends, max(0, sum(map(len, ends)) - excess)))]
            whole = self._encode([""] * len(prompts), [self._text(r) for r in ends])
        return whole[: self.max_length]

    def _encode(self, prompts: Sequence[str], responses: Sequence[str]) -> tuple[int, ...]:
        """Ids of the whole text, which ends open. Prompts keep the control tokens of their chat format; responses have none."""
        controls = {c for response in responses for c in controls_in(self.tokenizer, response)}
        if not controls:
            return tuple(open_ids(self.tokenizer, self.form(prompts, responses)))
        for control in controls:
            responses = [r.replace(control, control[0] + CUT + control[1:]) for r in responses]
        first, *rest = self.form(prompts, responses).split(CUT)
        ids = open_ids(self.tokenizer, first)
        for piece in rest:
            ids += self._plain(piece)
        return tuple(ids)

    def _plain(self, text: str) -> list[int]:
        return list(self.tokenizer(text, add_special_tokens=False)["input_ids"])

    def _text(self, ids: Sequence[int]) -> str:
        return self.tokenizer.decode(list(ids), skip_special_tokens=False)


def shortened(parts: Sequence[Sequence[int]], room: int) -> list[list[int]]:
    """The ends of sequences that have `room` tokens in all: none is longer than one common bound, the largest that fits."""
    low, high = 0, max(map(len, parts), default=0)
    while low < high:
        bound = (low + high + 1) // 2
        low, high = (bound, high) if sum(min(len(p), bound) for p in parts) <= room else (low, bound - 1)
    left = room - sum(min(len(p), low) for p in parts)
    kept = []
    for part in parts:
        extra = int(len(part) > low and left > 0)
        left -= extra
        size = min(len(part), low + extra)
        kept.append(list(part[len(part) - size :]))
    return kept
