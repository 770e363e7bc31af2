"""Models on disk as rollouts need them: which architecture a folder has, and its tensors."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

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


INDEX = "model.safetensors.index.json"
BIN_INDEX = "pytorch_model.bin.index.json"


class WeightsError(RuntimeError):
    """A folder whose weights cannot be read, or are not all of its model's; names folder and tensor."""


def weight_files(folder: Path) -> list[Path]:
    """The files that transformers loads a model from; others, a value head's for one, may stand beside them."""
    for index in (INDEX, BIN_INDEX):
        if (folder / index).is_file():
            names = set(json.loads((folder / index).read_text())["weight_map"].values())
            return [folder / name for name in sorted(names)]
        one = folder / index.removesuffix(".index.json")
        if one.is_file():
            return [one]
    return sorted(folder.glob("model*.safetensors"))


def mark_of(source: str) -> str:
    """A hash of the files that a folder's weights are in: their names, sizes and heads, and 64 KiB at 64 places of each.

    Not of every byte: a base of 140 GB would take minutes, and a training step changes weights everywhere.
    """
    digest = hashlib.blake2b(digest_size=16)
    for file in weight_files(Path(source)):
        size = file.stat().st_size
        digest.update(f"{file.name} {size}".encode())
        with file.open("rb") as opened:
            for place in range(64):
                opened.seek(size * place // 64)
                digest.update(opened.read(1 << 16))
    return digest.hexdigest()


def tensors_in_files(source: str) -> Iterator[tuple[str, Tensor]]:
    """(name, tensor) of a folder's safetensors files as they stand there, in a fixed order."""
    from safetensors import safe_open

    for file in weight_files(Path(source)):
        with safe_open(file, framework="pt") as opened:
            for name in sorted(opened.keys()):
                yield name, opened.get_tensor(name)


class DiskTensors:
    """A folder's parameters under the names that the loaded model has, each read when it is asked for.

    Names in files may be others than the model's: without the prefix of its body (GPT-2), renamed, fused, or split, beside
    buffers that the model computes itself. Where the files' heads have every parameter of the model in its shape, tensors
    are read from them one by one; any other folder is loaded by transformers, whole and on the CPU.

    Raises:
        WeightsError: a file that cannot be read, or a parameter that the files do not hold.
    """

    def __init__(self, source: str) -> None:
        self._source = source
        self._wanted, tied = _parameters(source)
        self._opened = self._streamed(tied)
        self._loaded = {} if self._opened else _loaded(source)

    def _streamed(self, tied: set[str]) -> dict[str, Any]:
        """Files by parameter; empty where transformers has to load the folder."""
        from safetensors import SafetensorError, safe_open

        opened: dict[str, Any] = {}
        for path in weight_files(Path(self._source)):
            if path.suffix != ".safetensors":
                return {}
            try:
                file: Any = safe_open(path, framework="pt")
            except (OSError, SafetensorError) as error:
                raise WeightsError(f"{path} cannot be read: {' '.join(str(error).split())}") from None
            opened |= dict.fromkeys(file.keys(), file)
        shapes = {n: tuple(opened[n].get_slice(n).get_shape()) for n in self._wanted if n in opened}
        # A second name of a tied tensor in the files may hold other numbers; transformers decides what that means.
        if shapes != self._wanted or tied & opened.keys():
            return {}
        return {name: opened[name] for name in self._wanted}

    def __getitem__(self, name: str) -> Tensor:
        return self._opened[name].get_tensor(name) if self._opened else self._loaded[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._wanted if self._opened else self._loaded)


def tensors_on_disk(source: str) -> Iterator[tuple[str, Tensor]]:
    """(name, tensor) of a folder's parameters as `DiskTensors` names them, in the model's order; what is tied comes once."""
    tensors = DiskTensors(source)
    for name in tensors:
        yield name, tensors[name]


def _parameters(source: str) -> tuple[dict[str, tuple[int, ...]], set[str]]:
    """(shape of every parameter of a folder's model, further names of tied ones), without its weights."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    with torch.device("meta"):
        model: Any = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(source))
    wanted = {name: tuple(p.shape) for name, p in model.named_parameters()}
    every = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    return wanted, every - wanted.keys()


def _loaded(source: str) -> dict[str, Tensor]:
    from transformers import AutoModelForCausalLM

    return {name: p.detach() for name, p in load_model(AutoModelForCausalLM, source, dtype="auto").named_parameters()}


def load_model(kind: Any, source: str, **options: Any) -> Any:
    """A model as transformers loads it from a folder, with nothing taken from the folder's generation settings.

    transformers refuses folders whose generation settings contradict each other, though nothing here samples by them: the
    model gets plain ones in their place.

    Args:
        kind: an auto class of transformers, such as AutoModelForCausalLM. options: of its `from_pretrained`.

    Raises:
        WeightsError: transformers cannot load the folder, or would start a parameter at random.
    """
    from transformers import GenerationConfig
    from transformers.utils import logging

    logging.disable_progress_bar()
    try:
        model, said = kind.from_pretrained(source, generation_config=GenerationConfig(), output_loading_info=True, **options)
    except Exception as error:  # whatever transformers and its readers raise for files that they cannot take
        line = " ".join(str(error).split())
        raise WeightsError(f"the weights in {source!r} cannot be loaded: {type(error).__name__}: {line}") from error
    check_loading(source, said)
    return model


def check_loading(source: str, said: Mapping[str, Any]) -> None:
    """Raises WeightsError where transformers says that parameters were not in the files, and so start at random."""
    for kind, what in (("missing_keys", "has no weights for"), ("mismatched_keys", "has weights of another shape for")):
        if names := sorted(map(str, said.get(kind) or ())):
            more = f" and {len(names) - 1} more" if len(names) > 1 else ""
            raise WeightsError(f"{source!r} {what} {names[0]}{more}, which would start at random; save the whole model")
