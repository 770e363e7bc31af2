"""Seeds that depend on what is sampled, never on when or where."""

from __future__ import annotations

import hashlib
import random

SEEDS = 1 << 63  # what is derived from a seed fits a signed 64-bit number, and so does a seed that a run takes by itself


def seed_of(run_seed: int, stream: str, *key: int | str) -> int:
    """A stable 63-bit hash of (run seed, stream, key…), equal on every machine and Python.

    For a sampled completion the key is (round, item, agent, candidate). Two streams ("target", "comparator", "eval")
    never share a seed, and nothing that is sampled elsewhere can shift one.
    """
    text = repr((int(run_seed), stream, *key)).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "big") >> 1


def generator_of(run_seed: int, stream: str, *key: int | str) -> random.Random:
    """A named generator of its own, for orders and draws (data order, pair selection, replay)."""
    return random.Random(seed_of(run_seed, stream, *key))
