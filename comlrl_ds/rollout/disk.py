"""Models on disk as rollouts need them: which architecture a folder has, and its tensors."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

# What may differ between two folders of one architecture.
_IGNORED = {"_name_or_path", "dtype", "torch_dtype", "transformers_version", "use_cache"}
_IGNORED |= {"bos_token_id", "eos_token_id", "pad_token_id"}


def shape_of(source: str) -> str:
    """Equal for folders whose weights an engine can exchange. A repository name that is no folder stands for itself."""
    config = Path(source) / "config.json"
    if not config.is_file():
        return source
    fields = {k: v for k, v in json.loads(config.read_text()).items() if k not in _IGNORED}
    return hashlib.blake2b(json.dumps(fields, sort_keys=True).encode(), digest_size=8).hexdigest()


def mark_of(source: str) -> str:
    """A hash of a folder's safetensors files: their names, sizes and heads, and 64 KiB at 64 places of each.

    Not of every byte: a base of 140 GB would take minutes, and a training step changes weights everywhere.
    """
    digest = hashlib.blake2b(digest_size=16)
    for file in sorted(Path(source).glob("*.safetensors")):
        size = file.stat().st_size
        digest.update(f"{file.name} {size}".encode())
        with file.open("rb") as opened:
            for place in range(64):
                opened.seek(size * place // 64)
                digest.update(opened.read(1 << 16))
    return digest.hexdigest()


class DiskTensors:
    """A folder's tensors by name, each read when it is asked for."""

    def __init__(self, source: str) -> None:
        from safetensors import safe_open

        files = [safe_open(file, framework="pt") for file in sorted(Path(source).glob("*.safetensors"))]
        self._opened = {name: opened for opened in files for name in opened.keys()}  # noqa: SIM118

    def __getitem__(self, name: str) -> Tensor:
        return self._opened[name].get_tensor(name)


def tensors_on_disk(source: str) -> Iterator[tuple[str, Tensor]]:
    """(name, tensor) of a folder's safetensors files, in a fixed order; a tied head, being the embedding, is left out."""
    from safetensors import safe_open

    folder = Path(source)
    tied = json.loads((folder / "config.json").read_text()).get("tie_word_embeddings", False)
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, framework="pt") as opened:
            for name in sorted(opened.keys()):
                if not (tied and name == "lm_head.weight"):
                    yield name, opened.get_tensor(name)
