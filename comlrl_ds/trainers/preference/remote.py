"""A comparator behind HTTP in one collection: asked at once, journaled as it answers, handed over task by task."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from comlrl_ds.config.api_settings import APISettings
from comlrl_ds.preference.api_comparator import APIAnswer, APIComparator, APICounters, Asking
from comlrl_ds.preference.api_formats import Answer, APIRequest
from comlrl_ds.preference.asked import mark
from comlrl_ds.preference.collection import SampledItem
from comlrl_ds.preference.journal import Journal, Known
from comlrl_ds.preference.prompts import JointPrompt
from comlrl_ds.rollout.base import Sampling
from comlrl_ds.trainers.preference.comparator import Comparator


@dataclass
class Asked:
    """What is being answered: `items` gives a task when all its requests have ended."""

    items: Iterator[SampledItem]
    counters: APICounters

    def metrics(self) -> dict[str, float]:
        """Of this collection."""
        c = self.counters
        return {
            "iter/api_requests": c.requests, "iter/api_retries": c.retries, "iter/api_failures": c.failures,
            "iter/api_answers": c.answers, "iter/api_known": c.known,
        }  # fmt: skip


@contextmanager
def ask_api(
    comparator: Comparator, joints: Sequence[JointPrompt], sampling: Sampling, round: int, journal: Journal, known: Known
) -> Iterator[Asked]:
    """Asks for every task; answers that the journal has are not asked for again."""
    requests = comparator.requests(joints)

    settings = comparator.args.api
    asked = {(r.index, r.agent): _mark(settings, sampling, r) for r in requests}

    def keep(round: int, item: int, agent: int, candidate: int, answer: Answer) -> None:
        of = asked[item, agent]
        journal.append("answer", round=round, item=item, agent=agent, candidate=candidate, of=of, **answer._asdict())

    same = {place: answer for place, (of, answer) in known.answers.items() if of == asked.get((place[1], place[2]))}
    with APIComparator(settings, sampling, keep) as api:
        asking = api.ask(requests, round=round, known=same)
        yield Asked(_by_task(comparator, joints, requests, asking), api.counters)


def _mark(settings: APISettings, sampling: Sampling, request: APIRequest) -> str:
    """Of an answer: where it is asked for, of which model, and everything that is sent but the key."""
    where = [settings.format, settings.place, settings.model, settings.extra_body, settings.item_fields]
    item = request.item if settings.format == "generic" else None
    return mark(where, sampling.as_dict(), request.prompt, request.max_new_tokens, item)


def _by_task(
    comparator: Comparator, joints: Sequence[JointPrompt], requests: Sequence[APIRequest], asking: Asking
) -> Iterator[SampledItem]:
    writers = len(requests) // max(len(joints), 1)
    waiting = [writers] * len(joints)
    answers: dict[int, tuple[Answer | None, ...]] = {}
    for number, answer in asking:
        count = requests[number].candidates
        answers[number] = answer.answers if isinstance(answer, APIAnswer) else (None,) * count
        task = number // writers
        waiting[task] -= 1
        if not waiting[task]:
            yield comparator.answered(joints[task], [answers[task * writers + k] for k in range(writers)])
