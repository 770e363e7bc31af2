"""Requests to an engine that two test files make."""

from __future__ import annotations

from tiny_models import some_ids

from comlrl_ds.rollout.base import Request, Sampling

PLAIN = Sampling(1.0)


def request(seed, prompt=None, tokens=8, stops=()):
    return Request("agent_0", tuple(prompt or some_ids(seed, 2 + seed % 7)), tokens, seed, stops)


REQUESTS = [request(seed, tokens=3 + seed % 6, stops=(2, 5)) for seed in range(16)]
