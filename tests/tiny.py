"""Tiny random models with real tokenizers, small enough for vLLM, DeepSpeed and transformers in seconds."""

from __future__ import annotations

from pathlib import Path

CHAT_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
VOCABULARY = 320


def tiny_tokenizer():
    """A byte-level BPE: 256 bytes and a few merges. Its pad token is its EOS, as in many chat models."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=VOCABULARY, special_tokens=special, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(["the tide and the moon", "user assistant system topic answer"] * 4, trainer)
    names = {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>", "pad_token": "<|im_end|>", "unk_token": "<|endoftext|>"}
    wrapped = PreTrainedTokenizerFast(tokenizer_object=tokenizer, **names)
    wrapped.chat_template = CHAT_TEMPLATE
    return wrapped


def tiny_config(tied: bool = True, layers: int = 2):
    from transformers import LlamaConfig

    return LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=64, intermediate_size=128, num_hidden_layers=layers, num_attention_heads=2,
        num_key_value_heads=1, head_dim=32, max_position_embeddings=512, tie_word_embeddings=tied, bos_token_id=1,
        eos_token_id=2, pad_token_id=2,
    )  # fmt: skip


def tiny_lm(seed: int, *, tied: bool = True, layers: int = 2, scale: float = 6.0):
    """A random model. `scale` widens the usual initialisation, so that its answers are not almost uniform."""
    import torch
    from transformers import LlamaForCausalLM

    torch.manual_seed(seed)
    lm = LlamaForCausalLM(tiny_config(tied, layers))
    with torch.no_grad():
        for p in lm.parameters():
            if p.dim() > 1:
                p.mul_(scale)
    return lm


def save_tiny_model(folder: Path, seed: int, *, tied: bool = True, dtype: str = "float32", layers: int = 2) -> Path:
    """A tiny model with its tokenizer, in Hugging Face layout."""
    import torch

    tiny_lm(seed, tied=tied, layers=layers).to(getattr(torch, dtype)).save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder
