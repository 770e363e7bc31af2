"""Dropout in the models of engines: off by its effect, or on with masks that follow from the run's seed."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from comlrl_ds.maths.seeds import seed_of

# Names under which configurations and modules keep a rate: attention_dropout, resid_pdrop, drop_path_rate, layerdrop …
_RATE = re.compile(r"dropout|pdrop|drop_?path|drop_?prob|drop_?rate|layer_?drop")
# Two states of the random generator. Whatever draws from it in a forward computes something else from the second.
_SEEDS = (1, 2)


def clear_rates(config: Any) -> None:
    """Sets every dropout rate of a configuration to 0, those of the configurations in it, too."""
    for holder, name, _ in _rates(config):
        setattr(holder, name, 0.0)


def silence(model: Any, original: Any) -> None:
    """Sets every dropout rate in a loaded model to 0. Saved folders keep those of its source: see `published`.

    Args:
        model: built from a configuration without rates. original: the configuration with its rates.
    """
    for module in model.modules():
        if isinstance(module, nn.modules.dropout._DropoutNd):
            module.p = 0.0
        for name, value in list(vars(module).items()):
            if _is_rate(name, value):
                setattr(module, name, 0.0)
    clear_rates(model.config)
    model.source_rates = _of_parts(model.config, original)


@contextmanager
def published(model: Any) -> Iterator[None]:
    """For the length of a block the model's configuration is what a saved folder should hold: made for sampling, with the
    dropout rates of the folder that the model came from.
    """
    config = model.config
    rates, use_cache = getattr(model, "source_rates", []), config.use_cache
    config.use_cache = True
    for holder, name, value in rates:
        setattr(holder, name, value)
    try:
        yield
    finally:
        config.use_cache = use_cache
        for holder, name, _ in rates:
            setattr(holder, name, 0.0)


@torch.no_grad()
def check_silenced(model: Any, score: Callable[[], Tensor], device: str) -> None:
    """Checks that a model whose dropout was turned off computes the same whatever the random generator's state is.

    Args:
        model: as `silence` left it; any other is not looked at. score: runs one forward in training mode; a collective where
            the engine is sharded, and the same forward each time.

    Raises:
        ValueError: it does not; with the first module whose output differs.
    """
    if not hasattr(model, "source_rates") or not model.training:
        return
    first, second = (_seeded(score, seed, device) for seed in _SEEDS)
    # Kernels may differ from one call to the next without drawing anything: then the first seed gives another value, too.
    if torch.equal(first, second) or not torch.equal(first, _seeded(score, _SEEDS[0], device)):
        return
    name = _first_that_differs(model, score, device)
    raise ValueError(
        f"args.disable_dropout: with every dropout rate of its configuration at 0, this model still draws random numbers in"
        f" training, first in {name or type(model).__name__}; change that in the model's code, or write disable_dropout: false"
    )


def _seeded(score: Callable[[], Tensor], seed: int, device: str) -> Tensor:
    with drawn_from(seed, device):
        return score()


@contextmanager
def drawn_from(seed: int, device: str) -> Iterator[None]:
    """For the length of a block random numbers follow from a seed; draws before and after it are not moved.

    Args:
        device: where the model computes, beside the host.
    """
    devices = [torch.device(device)] if device.startswith("cuda") else []
    with torch.random.fork_rng(devices=devices):
        torch.manual_seed(seed)
        yield


def masks_of(
    seed: int | None, rank: int, step: int, inputs: dict[str, Tensor | None], device: str
) -> AbstractContextManager[None]:
    """For the length of a block the masks of dropout follow from a role's seed, the rank, the step, and what the forward reads:
    the two passes of a step draw the same ones, and a run that goes on draws what it would have drawn.

    Args:
        seed: of the role; None: its dropout is off. step: that are behind it. inputs: of the forward.
    """
    if seed is None:
        return nullcontext()
    digest = hashlib.blake2b(digest_size=8)
    for name in sorted(inputs):
        value = inputs[name]
        if value is not None:
            digest.update(f"{name} {tuple(value.shape)}".encode())
            digest.update(value.cpu().contiguous().numpy().tobytes())
    return drawn_from(seed_of(seed, "mask", rank, step, digest.hexdigest()), device)


@contextmanager
def still(model: nn.Module) -> Iterator[None]:
    """For the length of a block a model computes without dropout, as it does where it samples."""
    was = model.training
    model.train(False)
    try:
        yield
    finally:
        model.train(was)


def _first_that_differs(model: nn.Module, score: Callable[[], Tensor], device: str) -> str | None:
    """The first module, in the order in which they end, that gives something else with another state of the generator."""
    seen: list[tuple[str, Tensor]] = []

    def hook(name: str) -> Callable[..., None]:
        def note(_: Any, __: Any, output: Any) -> None:
            while isinstance(output, tuple | list) and output:
                output = output[0]
            if isinstance(output, Tensor):
                seen.append((name, output.detach().double().sum().cpu()))

        return note

    handles = [module.register_forward_hook(hook(name)) for name, module in model.named_modules() if name]
    runs = []
    for seed in _SEEDS:
        seen.clear()
        _seeded(score, seed, device)
        runs.append(list(seen))
    for handle in handles:
        handle.remove()
    return next((name for (name, a), (_, b) in zip(*runs) if not torch.equal(a, b)), None)


def _is_rate(name: str, value: Any) -> bool:
    return isinstance(value, float) and 0 < value <= 1 and _RATE.search(name) is not None


def _rates(config: Any) -> list[tuple[Any, str, float]]:
    """(configuration, name, value) of every rate of a configuration and of those in it."""
    found = []
    for name, value in vars(config).items():
        if hasattr(value, "to_dict"):
            found += _rates(value)
        elif _is_rate(name, value):
            found.append((config, name, value))
    return found


def _of_parts(config: Any, original: Any) -> list[tuple[Any, str, float]]:
    """Where a configuration and those in it had rates: the loaded model's may be a part of the folder's."""
    parts = {type(original): original} | {type(part): part for part in vars(original).values() if hasattr(part, "to_dict")}
    found = []
    if twin := parts.get(type(config)):
        found += [(config, name, value) for name, value in vars(twin).items() if _is_rate(name, value)]
    for name, value in vars(config).items():
        if hasattr(value, "to_dict"):
            found += _of_parts(value, getattr(twin, name, original))
    return found
