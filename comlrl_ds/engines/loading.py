"""Model sources: what a user may name, and the models that come from it."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from comlrl_ds.config.errors import ConfigError, Problem
from comlrl_ds.config.model_files import check_vocabulary
from comlrl_ds.config.references import is_path
from comlrl_ds.rollout.adapters import CONFIG_FILE, base_of
from comlrl_ds.rollout.disk import load_model, weight_files


def local_folder(source: str, path: str) -> str:
    """A model as a local folder: the folder itself, or a repository fetched into the hub's cache.

    Raises:
        ConfigError: neither a folder with a config and safetensors weights, nor a repository that can be fetched.
    """
    folder = Path(source).expanduser()
    if folder.is_dir():
        if not (folder / "config.json").is_file():
            raise ConfigError(Problem(path, f"{source!r} has no config.json; give a folder in Hugging Face layout"))
        if not weight_files(folder):
            raise ConfigError(Problem(path, f"{source!r} holds no weights; save the model there with save_pretrained"))
        return str(folder.resolve())
    if is_path(source):
        raise ConfigError(Problem(path, f"no folder {source!r}"))
    from huggingface_hub import snapshot_download

    try:
        return snapshot_download(source, allow_patterns=["*.json", "*.safetensors", "*.jinja", "*.model", "*.txt"])
    except Exception as error:  # whatever the hub client raises: not found, gated, offline, no network
        first = str(error).strip().splitlines()[0]
        message = f"{source!r} is no folder here, and fetching it from the hub failed: {type(error).__name__}: {first}"
        raise ConfigError(Problem(path, message)) from None


def adapted_base(folder: str, path: str) -> str:
    """The local folder of the model that a PEFT folder is for.

    Raises:
        ConfigError: it does not say, or there is none.
    """
    base = base_of(folder)
    if not base:
        message = f"{folder!r} does not say which model it is for; set base_model_name_or_path in its {CONFIG_FILE}"
        raise ConfigError(Problem(path, message))
    try:
        return local_folder(base, path)
    except ConfigError as error:
        raise ConfigError(Problem(path, f"the base of the adapter {folder!r}: {p.message}") for p in error.problems) from None


def load_tokenizer(source: str, path: str) -> Any:
    """The tokenizer beside a model, for whose every token the model has an embedding.

    Raises:
        ConfigError: there is none, or it knows tokens that the model does not.
    """
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(source)
    except (OSError, ValueError) as error:
        first = str(error).strip().splitlines()[0]
        raise ConfigError(Problem(path, f"no tokenizer in {source!r}: {first}")) from None
    check_vocabulary(source, tokenizer.get_vocab(), path)
    return tokenizer


def stop_ids(source: str, tokenizer: Any) -> tuple[int, ...]:
    """Ids that end a completion: every EOS of the tokenizer, of generation_config.json and of config.json (0 is one, too).

    Raises:
        ConfigError: a file that is no JSON object, or whose eos_token_id is neither an id nor a list of ids.
    """
    ids = set() if tokenizer.eos_token_id is None else {int(tokenizer.eos_token_id)}
    for name in ("generation_config.json", "config.json"):
        file = Path(source) / name
        content = _json_object(file) if file.is_file() else {}
        text = content.get("text_config") or {}
        if not isinstance(text, dict):
            raise ConfigError(Problem("", f"{file}: text_config is {text!r}, which is no object"))
        for section in (content, text):
            listed = section.get("eos_token_id")
            listed = listed if isinstance(listed, list) else [] if listed is None else [listed]
            for value in listed:
                if isinstance(value, bool) or not isinstance(value, int) or value < 0:
                    raise ConfigError(Problem("", f"{file}: eos_token_id holds {value!r}; write token ids, from 0"))
            ids |= set(listed)
    return tuple(sorted(ids))


def _json_object(file: Path) -> dict[str, Any]:
    try:
        content = json.loads(file.read_bytes())
    except ValueError as error:
        raise ConfigError(Problem("", f"{file} is not JSON: {error}")) from None
    if not isinstance(content, dict):
        raise ConfigError(Problem("", f"{file} holds {content!r}, which is no JSON object"))
    return content


def load_causal_lm(
    source: str, *, dtype: str, attn_implementation: str | None, dropout: bool, zero3_config: dict[str, Any] | None = None
) -> Any:
    """A causal LM for training, on the CPU; DeepSpeed moves it.

    Args:
        dtype: compute type. dropout: keep the model's own; otherwise every dropout is set to 0.
        zero3_config: DeepSpeed configuration at whose stage 3 each rank of the default group keeps its part only, from the
            first tensor on; a collective then.
    """
    from transformers import AutoModelForCausalLM

    return _load(AutoModelForCausalLM, source, dtype, attn_implementation, dropout, zero3_config)


def load_backbone(
    source: str, *, dtype: str, attn_implementation: str | None, dropout: bool, zero3_config: dict[str, Any] | None = None
) -> Any:
    """The same without the vocabulary head: a model that gives hidden states."""
    from transformers import AutoModel

    return _load(AutoModel, source, dtype, attn_implementation, dropout, zero3_config)


def _load(kind: Any, source: str, dtype: str, attention: str | None, dropout: bool, zero3_config: dict[str, Any] | None) -> Any:
    import torch
    from transformers import AutoConfig

    from comlrl_ds.engines.dropout import clear_rates, silence

    original = AutoConfig.from_pretrained(source)
    config = copy.deepcopy(original)
    if not dropout:
        # Code that calls dropout as a function reads the rate from here: when it is built, or in each forward.
        clear_rates(config)
    with _partitioned(original, zero3_config):
        model = load_model(kind, source, config=config, dtype=getattr(torch, dtype), attn_implementation=attention)
    model.config.use_cache = False
    if not dropout:
        silence(model, original)
    return model.train()


@contextmanager
def _partitioned(model_config: Any, config: dict[str, Any] | None) -> Iterator[None]:
    """Lets transformers load into ZeRO-3 shards, for the length of a block: its switch is one for the whole process."""
    if config is None:
        yield
        return
    from transformers.integrations.deepspeed import HfDeepSpeedConfig, unset_hf_deepspeed_config

    from comlrl_ds.engines.ds_config import fill_hidden_size

    fill_hidden_size(config, model_config.get_text_config().hidden_size)
    switch = HfDeepSpeedConfig(config)  # held: transformers keeps a weak reference
    try:
        yield
    finally:
        unset_hf_deepspeed_config()
        del switch
