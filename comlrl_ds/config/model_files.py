"""What a model folder says of itself: its config.json, and names and shapes in its safetensors headers. No weight is read."""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from comlrl_ds.config.errors import ConfigError, Problem
from comlrl_ds.config.references import is_path

INDEX = "model.safetensors.index.json"
# Tensors that hold a row for every token id.
_EMBEDDINGS = ("embed_tokens.weight", "wte.weight", "word_embeddings.weight", "embed_in.weight")
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


def embedding_rows(folder: Path) -> int | None:
    """How many token ids a model has embeddings for; None where neither its config nor its weights tell."""
    try:
        config = config_of(folder)
        stated = (config.get("text_config") or config).get("vocab_size")
        if isinstance(stated, int):
            return stated
        shapes = tensor_shapes(folder) or {}
    except UNREADABLE:
        return None
    return next((shape[0] for name, shape in shapes.items() if name.endswith(_EMBEDDINGS)), None)


def vocabulary_of(folder: Path) -> dict[str, int]:
    """Id of every token of a folder's tokenizer, as far as its JSON files tell; no tokenizer is built."""
    try:
        file = folder / "tokenizer.json"
        content = json.loads(file.read_text()) if file.is_file() else {}
        found = content.get("model", {}).get("vocab", {})
        found = dict(found) if isinstance(found, dict) else {entry[0]: k for k, entry in enumerate(found)}
        found |= {entry["content"]: entry["id"] for entry in content.get("added_tokens", [])}
        file = folder / "added_tokens.json"
        return found | (json.loads(file.read_text()) if file.is_file() else {})
    except UNREADABLE:
        return {}  # what loads the tokenizer says what is wrong with it


def check_vocabulary(source: str, vocabulary: Mapping[str, int], path: str) -> None:
    """Checks that a model has an embedding for every id that its tokenizer makes of a text.

    Args:
        source: folder of the model. vocabulary: id of every token of the tokenizer. path: of the model or tokenizer.

    Raises:
        ConfigError: it has fewer; with the first such token.
    """
    folder = Path(source)
    rows = embedding_rows(folder)
    if rows is None:
        return
    beyond = sorted((id, token) for token, id in vocabulary.items() if id >= rows)
    if beyond:
        # A text model may have the tokenizer of its family, with tokens that stand for pictures and sounds and for no text.
        other = _tokens_of_other_inputs(folder)
        beyond = [entry for entry in beyond if entry[1] not in other]
    if beyond:
        (id, token), more = beyond[0], f" (and {len(beyond) - 1} more)" if len(beyond) > 1 else ""
        message = (
            f"token {token!r} of the tokenizer has id {id}{more}, but {source!r} has embeddings for {rows} ids,"
            f" 0 to {rows - 1}; call model.resize_token_embeddings(len(tokenizer)) and save model and tokenizer"
        )
        raise ConfigError(Problem(path, message))


def _tokens_of_other_inputs(folder: Path) -> set[str]:
    try:
        content = json.loads((folder / "tokenizer_config.json").read_text())
    except UNREADABLE:
        return set()
    more = content.get("extra_special_tokens") or content.get("model_specific_special_tokens") or {}
    named = content | (more if isinstance(more, dict) else {})
    kinds = re.compile(r"^(image|audio|video|vision|[be]o[iav])[a-z_]*_token$|^[be]o[iav]_token$")
    return {v if isinstance(v, str) else str((v or {}).get("content")) for n, v in named.items() if kinds.match(n)}


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
