"""Unit tests use no network, no GPU and one thread: they must give the same numbers beside other work."""

from __future__ import annotations

import os

os.environ.update(OMP_NUM_THREADS="1", TOKENIZERS_PARALLELISM="false", HF_HUB_OFFLINE="1")

import pytest
import torch
from hypothesis import settings
from transformers.utils import logging

torch.set_num_threads(1)
logging.disable_progress_bar()
logging.set_verbosity_error()
# The examples are the same in every run, and how busy the machine is decides nothing.
settings.register_profile("unit", deadline=None, derandomize=True, database=None, max_examples=60)
settings.load_profile("unit")


@pytest.fixture(scope="session")
def model_folders(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Two tiny Llamas of one architecture with different weights, each with a tokenizer beside it."""
    import tiny_models

    root = tmp_path_factory.mktemp("models")
    tokenizer = tiny_models.word_tokenizer()
    return [tiny_models.save(root / f"llama_{k}", tiny_models.llama(k, layers=1), tokenizer) for k in range(2)]
