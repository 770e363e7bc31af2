"""What a model folder says of itself: its config.json, and names and shapes in its safetensors headers. No weight is read."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from comlrl_ds.config.references import is_path

INDEX = "model.safetensors.index.json"
# What reading a folder that is no model's, or a broken one, may raise.
UNREADABLE = (OSError, ValueError, KeyError, TypeError, AttributeError, struct.error)


def model_folder(source: str) -> Path | None:
    """The folder of a source, or of a repository in the hub's cache if it was ever downloaded; asks no network."""
    folder = Path(source).expanduser()
    return folder if (folder / "config.json").is_file() else _cached(source)


def config_of(folder: Path) -> dict[str, Any]:
    """Its config.json.

    Raises:
        OSError, ValueError: there is none that can be read.
    """
    return json.loads((folder / "config.json").read_text())


def tensor_shapes(folder: Path) -> dict[str, tuple[int, ...]] | None:
    """Shape of every tensor of a model's safetensors files, by name; None where a file is missing.

    Raises:
        OSError, ValueError, KeyError, struct.error: a file that cannot be read.
    """
    content = _index(folder)
    files = [folder / name for name in sorted(set(content.get("weight_map", {}).values())) or ["model.safetensors"]]
    if not all(f.is_file() for f in files):
        return None
    return {name: shape for f in files for name, shape in shapes_in(f).items()}


def total_bytes(folder: Path) -> int | None:
    """Size of all weights by the index of their files, which need not be here."""
    return _index(folder).get("metadata", {}).get("total_size")


def shapes_in(file: Path) -> dict[str, tuple[int, ...]]:
    """Shape of every tensor of one safetensors file, by name: a file starts with the length of its JSON header, 8 bytes."""
    with file.open("rb") as opened:
        (length,) = struct.unpack("<Q", opened.read(8))
        header: Mapping[str, Any] = json.loads(opened.read(length))
    return {name: tuple(entry["shape"]) for name, entry in header.items() if name != "__metadata__"}


def _index(folder: Path) -> dict[str, Any]:
    file = folder / INDEX
    return json.loads(file.read_text()) if file.is_file() else {}


def _cached(repository: str) -> Path | None:
    if is_path(repository):
        return None
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        found = try_to_load_from_cache(repository, "config.json")
    except HFValidationError:
        return None
    return Path(found).parent if isinstance(found, str) else None
