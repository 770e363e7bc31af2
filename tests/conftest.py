"""Small real models and tokenizers for every test folder."""

from __future__ import annotations

import os
import sys
from pathlib import Path

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("DS_ACCELERATOR", "cpu")

import pytest

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests"))

from tiny import save_tiny_model  # noqa: E402


@pytest.fixture(scope="session")
def root() -> Path:
    """The repository's folder."""
    return ROOT


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory) -> Path:
    """A random two-layer Llama with a tied head and a chat tokenizer whose pad token is its EOS."""
    return save_tiny_model(tmp_path_factory.mktemp("models") / "tiny", seed=1)


@pytest.fixture(scope="session")
def demo_model() -> Path:
    """The demo model, written once into models/ as the quickstart does."""
    from comlrl_ds.tasks.demo_model import write_demo_model

    return write_demo_model(ROOT / "models" / "smollm2-135m")
