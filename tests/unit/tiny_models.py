"""Tiny real models and tokenizers, and a scorer so plain that it can serve as the reference."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from torch import Tensor
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from comlrl_ds.rollout.base import Completion, PolicyWeights

VOCAB = 61


def gpt2(seed: int = 0, *, vocab: int = VOCAB, positions: int = 128, layers: int = 2, attn: str = "sdpa") -> Any:
    """Absolute positions, layer norms in the model's own type (so that float64 is float64 throughout), a tied head."""
    config = GPT2Config(
        vocab_size=vocab, n_positions=positions, n_embd=64, n_layer=layers, n_head=4, initializer_range=0.2,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    config._attn_implementation = attn
    torch.manual_seed(seed)
    return GPT2LMHeadModel(config).eval()


def llama(
    seed: int = 0, *, vocab: int = VOCAB, layers: int = 2, attn: str = "sdpa", std: float = 0.2, tied: bool = False
) -> Any:
    """Rotary positions, grouped key-value heads, an untied head."""
    torch.manual_seed(seed)
    return LlamaForCausalLM(llama_config(vocab, layers, attn, std, tied)).eval()


class HalvedLogits(LlamaForCausalLM):
    """Does to its logits what no config field tells."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        output = super().forward(*args, **kwargs)
        output.logits = output.logits * 0.5
        return output


def llama_config(vocab: int = VOCAB, layers: int = 2, attn: str = "sdpa", std: float = 0.2, tied: bool = False) -> Any:
    return LlamaConfig(
        vocab_size=vocab, hidden_size=64, intermediate_size=96, num_hidden_layers=layers, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=256, initializer_range=std, tie_word_embeddings=tied,
        bos_token_id=1, eos_token_id=2, attn_implementation=attn,
    )  # fmt: skip


def word_tokenizer(
    size: int = VOCAB, *, bos: bool = True, adds_bos: bool = True, pad: bool = False, chat_template: str | None = None
) -> Any:
    """Words w3, w4 … are ids 3, 4 …; 0 is <unk>, 1 <s>, 2 </s>."""
    words = ["<unk>", "<s>", "</s>"] + [f"w{k}" for k in range(3, size)]
    inner = Tokenizer(models.WordLevel({w: i for i, w in enumerate(words)}, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    if bos and adds_bos:
        inner.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    special = {"unk_token": "<unk>", "eos_token": "</s>"}
    special |= ({"bos_token": "<s>"} if bos else {}) | ({"pad_token": "</s>"} if pad else {})
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, **special)
    tokenizer.chat_template = chat_template
    return tokenizer


def merging_tokenizer() -> Any:
    """BPE in which "ab" + "c" is [ab, c], but "abc" is [a, bc]: b and c merge before a and b do."""
    vocabulary = {"<unk>": 0, "</s>": 1, "a": 2, "b": 3, "c": 4, "bc": 5, "ab": 6}
    inner = Tokenizer(models.BPE(vocabulary, [("b", "c"), ("a", "b")], unk_token="<unk>"))
    inner.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="</s>", unk_token="<unk>")


def save(folder: Path, lm: Any, tokenizer: Any = None) -> str:
    lm.save_pretrained(folder)
    if tokenizer is not None:
        tokenizer.save_pretrained(folder)
    return str(folder)


def token_scores(lm: Any, prompt: list[int], completion: list[int]) -> Tensor:
    """log p of each completion token, one unpadded sequence through the model's own forward."""
    row = torch.tensor([[*prompt, *completion]])
    logprobs = lm(input_ids=row).logits[0].double().log_softmax(-1)
    return torch.stack([logprobs[len(prompt) - 1 + t, token] for t, token in enumerate(completion)])


def completion_score(lm: Any, prompt: list[int], completion: list[int], last: bool) -> Tensor:
    """Σ log p over the completion, without its last token unless `last`."""
    kept = completion if last else completion[:-1]
    return token_scores(lm, prompt, kept).sum() if kept else torch.zeros((), dtype=torch.float64)


def some_ids(seed: int, count: int, vocab: int = VOCAB) -> list[int]:
    return torch.randint(3, vocab, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def completion(ids: list[int] | tuple[int, ...], finish: str = "length") -> Completion:
    return Completion(tuple(ids), finish, "version")


def weights_on_disk(name: str, folder: str) -> PolicyWeights:
    return PolicyWeights(name, folder, folder)
