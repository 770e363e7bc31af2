"""How large a model is, without loading it: from its weight files' headers, its config.json, or its name."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from comlrl_ds.config.model_files import UNREADABLE, config_of, model_folder, tensor_shapes, total_bytes

TYPE_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}
# (parameters, hidden units, layers) of well-known dense models, for a model of which only the name is known.
USUAL = [
    (0.135e9, 576, 30), (0.5e9, 896, 24), (1.2e9, 2048, 16), (1.7e9, 2048, 28), (3e9, 3072, 28), (8e9, 4096, 32),
    (14e9, 5120, 40), (32e9, 5120, 64), (70e9, 8192, 80), (123e9, 12288, 88), (405e9, 16384, 126),
]  # fmt: skip
USUAL_VOCABULARY = 128_256
# Experts share attention and embeddings: Mixtral 8x7B has 46.7 billion, 8x22B 141 billion parameters.
EXPERT_SHARE = 0.82


@dataclass(frozen=True)
class ModelShape:
    """Size of a model.

    Attributes:
        parameters: their number, a tied head counted once; None: unknown.
        hidden: units of the residual stream. layers: blocks. vocabulary: rows of the embedding.
        origin: where that is from: "weights", "config.json", "guess" (from the name) or "unknown".
        inner: hidden units of an MLP, of a mixture those that one token meets; 0: unknown.
        head: parameters of a vocabulary head that is not the embedding, which reward models and critics lack.
    """

    parameters: int | None
    hidden: int = 0
    layers: int = 0
    vocabulary: int = 0
    origin: str = "config.json"
    inner: int = 0
    head: int = 0

    @property
    def text(self) -> str:
        """'135M', 'about 70B (guess)'."""
        if self.parameters is None:
            return "?"
        number = short(self.parameters)
        return f"about {number} (guess)" if self.origin == "guess" else number


def short(number: int) -> str:
    """'135M'."""
    unit, name = next(((u, n) for u, n in ((10**9, "B"), (10**6, "M"), (10**3, "K")) if number >= u), (1, ""))
    return f"{number / unit:.3g}{name}"


def shape_of_model(source: str) -> ModelShape:
    """Size of the model in a folder, in the hub's cache, or, if it is in neither, as its name says."""
    folder = model_folder(source)
    if folder is None:
        return _guess(source)
    try:
        config = config_of(folder)
        shape = shape_of_config(config)
        counted = _count_in_files(folder, config.get("text_config") or config)
    except UNREADABLE:
        return _guess(source)
    return replace(shape, parameters=counted, origin="weights") if counted else shape


def shape_of_config(config: Mapping[str, Any]) -> ModelShape:
    """Size that a config.json states; exact for Llama, Mistral, Qwen2/3, Mixtral, Qwen3-MoE, Gemma and GPT-2.

    Raises:
        KeyError, TypeError: it is no config of a language model of these kinds.
    """
    c = config.get("text_config") or config
    if "n_embd" in c:
        return _gpt2(c)
    hidden, layers, vocabulary = c["hidden_size"], c["num_hidden_layers"], c["vocab_size"]
    kind = str(c.get("model_type", ""))
    heads = c["num_attention_heads"]
    width = c.get("head_dim") or hidden // heads
    queries, keys = heads * width, (c.get("num_key_value_heads") or heads) * width
    attention = hidden * (queries + 2 * keys) + queries * hidden
    if c.get("attention_bias"):
        attention += queries + 2 * keys + hidden
    elif kind.startswith("qwen2"):
        attention += queries + 2 * keys
    if kind.startswith(("qwen3", "gemma3")):
        attention += 2 * width
    norms = (4 if kind.startswith(("gemma2", "gemma3")) else 2) * hidden
    experts = c.get("num_local_experts") or c.get("num_experts") or 0
    inner = (c.get("moe_intermediate_size") if experts else None) or c["intermediate_size"]
    mlp = max(experts, 1) * 3 * hidden * inner + experts * hidden
    if shared := c.get("shared_expert_intermediate_size"):
        mlp += 3 * hidden * shared + hidden
    if c.get("mlp_bias") and not experts:
        mlp += 2 * inner + hidden
    # A config leaves out what is its class's default: heads are untied, but in Gemma.
    tied = c.get("tie_word_embeddings", config.get("tie_word_embeddings", kind.startswith("gemma")))
    head = 0 if tied else vocabulary * hidden
    total = layers * (attention + norms + mlp) + hidden + vocabulary * hidden + head
    met = inner * (c.get("num_experts_per_tok") or 2) + (shared or 0) if experts else inner
    return ModelShape(int(total), hidden, layers, vocabulary, inner=met, head=head)


def _gpt2(c: Mapping[str, Any]) -> ModelShape:
    hidden, layers, vocabulary = c["n_embd"], c["n_layer"], c["vocab_size"]
    inner = c.get("n_inner") or 4 * hidden
    block = 4 * hidden * hidden + 4 * hidden + 2 * hidden * inner + inner + hidden + 4 * hidden
    head = 0 if c.get("tie_word_embeddings", True) else vocabulary * hidden
    embeddings = (vocabulary + c.get("n_positions", 1024)) * hidden + head
    return ModelShape(int(layers * block + embeddings + 2 * hidden), hidden, layers, vocabulary, inner=inner, head=head)


def _count_in_files(folder: Path, config: Mapping[str, Any]) -> int | None:
    """Parameters of the folder's safetensors files: their headers hold all shapes. Else of their index; else None."""
    shapes = tensor_shapes(folder)
    if shapes is not None:
        return sum(map(math.prod, shapes.values()))
    if size := total_bytes(folder):
        dtype = config.get("dtype") or config.get("torch_dtype") or "bfloat16"
        return int(size) // TYPE_BYTES.get(dtype, 2)
    return None


def _guess(source: str) -> ModelShape:
    """Size that a name states: 'Llama-3.1-70B-Instruct', 'smollm2-135m', 'Mixtral-8x7B'."""
    name = source.rstrip("/").rpartition("/")[2].lower()
    match = re.search(r"(?<![a-z\d.])(?:(\d+)x)?(\d+(?:\.\d+)?)([mb])(?![a-z\d])", name)
    if match is None:
        return ModelShape(None, origin="unknown")
    size = float(match[2]) * {"m": 1e6, "b": 1e9}[match[3]]
    _, hidden, layers = min(USUAL, key=lambda row: abs(math.log(row[0] / max(size, 1.0))))
    if match[1]:
        size *= int(match[1]) * EXPERT_SHARE
    return ModelShape(int(size), hidden, layers, USUAL_VOCABULARY, "guess")
