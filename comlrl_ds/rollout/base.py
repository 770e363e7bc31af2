"""The words of rollouts, and what an engine has to do."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor


class RolloutError(RuntimeError):
    """An engine died, went silent, refused a request, or holds wrong weights."""


class RequestsRefused(RolloutError):
    """Some requests of a submission were refused; all others have been answered.

    Attributes:
        refused: (index of the request in its submission, the engine's reason).
    """

    def __init__(self, refused: Sequence[tuple[int, str]]) -> None:
        self.refused = list(refused)
        count = f"{len(self.refused)} request{'s' * (len(self.refused) > 1)}"
        super().__init__(f"{count} refused; the first: {self.refused[0][1]}")


@dataclass(frozen=True)
class Sampling:
    """The distribution that tokens are drawn from. `top_k` None and `top_p` 1 are off; `temperature` 0 is greedy.

    With `logprobs` completions say how probable their tokens were, at temperature 1 and over the whole vocabulary.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int | None = None
    min_new_tokens: int = 0
    logprobs: bool = False

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class Request:
    """One completion to sample: one request per candidate, each with its own seed."""

    policy: str
    prompt: tuple[int, ...]
    max_new_tokens: int
    seed: int
    stop_ids: tuple[int, ...] = ()

    @property
    def cost(self) -> float:
        """Expected work in generated tokens; prompts are computed in parallel and often shared."""
        return self.max_new_tokens + len(self.prompt) / 16


@dataclass(frozen=True)
class Completion:
    """Sampled ids (the stop token included), why sampling ended ("stop" | "length"), the weights that did it, and the
    engine's log-prob of each id in nats, where they were asked for.
    """

    ids: tuple[int, ...]
    finish_reason: str
    version: str
    logprobs: tuple[float, ...] = ()


@dataclass
class PolicyWeights:
    """A policy: a name, and weights that an engine may have to be given.

    Attributes:
        name: e.g. "agent_0".
        key: says which weights these are. Policies with equal keys have equal weights and share an engine's pass; an
            engine that holds the key needs no sync. A folder's key is its path, a trained actor's is name@version.
        source: folder whose architecture the weights have.
        tensors: a fresh pass over (name, tensor) in Hugging Face names, in this process; None means the weights on disk at
            `source`, unless there is a role.
        role: of the live actor whose weights they are; its ranks send them.
        base: folder of the model that the tensors are an adapter of, in the form of `rollout.adapters`; None: whole weights.
    """

    name: str
    key: str
    source: str
    tensors: Callable[[], Iterable[tuple[str, Tensor]]] | None = field(default=None, repr=False)
    role: str | None = None
    base: str | None = None


class RolloutEngine(ABC):
    """One engine: generates with the weights it holds, and can be given others.

    Attributes:
        source: folder that it was started from.
        held: key of the weights that it holds (`PolicyWeights.key`).
        connection: what to wait for while it works in another process; None if `receive` does the work itself.
        serves: names of the policies that it takes; None: any of its architecture.
    """

    source: str
    held: str
    connection: Connection | None = None
    serves: tuple[str, ...] | None = None

    @abstractmethod
    def submit(self, requests: Sequence[Request], sampling: Sampling) -> None:
        """Starts generating; results come from `receive`. One submission at a time."""

    @abstractmethod
    def receive(self) -> list[tuple[int, Completion]] | None:
        """Waits for the next finished completions, as (index in the submission, completion); None: all are there.

        Raises:
            RequestsRefused: in place of None, where the engine refused some requests. It takes the next submission as usual.
        """

    @abstractmethod
    def sync_weights(self, policy: PolicyWeights) -> SyncReport:
        """Makes the engine hold the policy's weights: caches dropped, version set, effect verified."""

    @abstractmethod
    def prompt_logprobs(self, rows: Sequence[Sequence[int]]) -> list[list[float]]:
        """log p of every token of a row but its first, by the engine's own forward at temperature 1."""

    @abstractmethod
    def shutdown(self) -> None:
        """Ends the engine and frees what it holds. May be called twice."""


@dataclass(frozen=True)
class SyncReport:
    """What a sync took: seconds and bytes sent."""

    seconds: float
    bytes: int
