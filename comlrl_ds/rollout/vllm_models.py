"""Models that vLLM takes with limits, known from their config.json before an engine is started: vLLM is not imported."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from comlrl_ds.config.errors import ConfigError, Problem
from comlrl_ds.config.model_files import UNREADABLE, config_of
from comlrl_ds.config.run_file import RolloutConfig

# Sizes of an attention head that vLLM's attention on CPUs computes.
CPU_HEAD_SIZES = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)
# Architectures of vLLM 0.32 for text that hold no adapters.
WITHOUT_ADAPTERS = frozenset({
    "BailingMoeV2_5ForCausalLM", "BailingMoeV3ForCausalLM", "BloomForCausalLM", "Cohere2MoeForCausalLM", "DbrxForCausalLM",
    "DeepseekV32ForCausalLM", "DeepseekV4ForCausalLM", "FalconForCausalLM", "FalconMambaForCausalLM", "GPT2LMHeadModel",
    "GPTJForCausalLM", "Gemma3nForCausalLM", "Glm5NextForCausalLM", "GlmMoeDsaForCausalLM", "HCXVisionV2ForCausalLM",
    "HYV4ForCausalLM", "HrmTextForCausalLM", "IQuestLoopCoderForCausalLM", "InklingForCausalLM",
    "InklingForConditionalGeneration", "KimiLinearForCausalLM", "Mamba2ForCausalLM", "MambaForCausalLM",
    "MiMoV2FlashForCausalLM", "MiMoV2ForCausalLM", "MiniMaxM3SparseForCausalLM", "OrionForCausalLM", "Qwen4ExpForCausalLM",
    "StableLmForCausalLM", "Step1ForCausalLM", "Step3TextForCausalLM", "Step3p5ForCausalLM", "Zamba2ForCausalLM",
})  # fmt: skip


def architecture_of(source: str) -> str:
    """The first of a folder's architectures; empty where its config.json tells none."""
    try:
        listed = config_of(Path(source)).get("architectures") or [""]
        return str(listed[0])
    except UNREADABLE:
        return ""


def check_head_size(config: RolloutConfig, device: str, source: str, path: str) -> None:
    """Checks that vLLM's attention on this kind of device computes heads of a model's size.

    Args:
        source: folder of the model. path: of the model in the settings.

    Raises:
        ConfigError: it does not.
    """
    if device != "cpu" or config.backend != "vllm" or config.urls:
        return
    try:
        content = config_of(Path(source))
        size = _head_size(content.get("text_config") or content)
    except UNREADABLE:
        return  # what loads the model says what is wrong with it
    if size is not None and size not in CPU_HEAD_SIZES:
        message = f"attention heads of {source!r} have size {size}, and vLLM on a CPU computes sizes"
        listed = ", ".join(map(str, CPU_HEAD_SIZES))
        raise ConfigError(Problem(path, f"{message} {listed}; write rollout.backend: transformers"))


def _head_size(config: Mapping[str, Any]) -> int | None:
    def first(*names: str) -> Any:
        return next((config[n] for n in names if isinstance(config.get(n), int)), None)

    if (stated := first("head_dim")) is not None:
        return stated
    hidden, heads = first("hidden_size", "n_embd", "d_model"), first("num_attention_heads", "n_head", "n_heads")
    return hidden // heads if hidden and heads else None
