"""Unit tests take one thread and leave the process as they found it: other tests may run in it, other work beside it."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch
from api_server import serve  # noqa: F401  # a fixture
from hypothesis import settings
from transformers.utils import logging

logging.disable_progress_bar()
logging.set_verbosity_error()
# The examples are the same in every run, and how busy the machine is decides nothing.
settings.register_profile("unit", deadline=None, derandomize=True, database=None, max_examples=60)
settings.load_profile("unit")


@pytest.fixture(scope="package", autouse=True)
def one_thread() -> Iterator[None]:
    """Tiny models gain nothing from more."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def own_environment() -> Iterator[None]:
    """The command line sets defaults for its process; a test's must not reach the next."""
    before = dict(os.environ)
    yield
    os.environ.clear()
    os.environ.update(before)


@pytest.fixture(scope="session")
def model_folders(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Two tiny Llamas of one architecture with different weights, each with a tokenizer beside it."""
    import tiny_models

    root = tmp_path_factory.mktemp("models")
    tokenizer = tiny_models.word_tokenizer()
    return [tiny_models.save(root / f"llama_{k}", tiny_models.llama(k, layers=1), tokenizer) for k in range(2)]
