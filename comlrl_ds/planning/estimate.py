"""What roles and rollout engines take of a device and of its host, by part, in bytes. Estimates: `plan` prints them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from comlrl_ds.planning.model_shapes import TYPE_BYTES, ModelShape

PARTS = ("weights", "gradients", "optimizer", "activations", "vLLM weights", "KV cache")

# fp32 master weights and the two states of Adam, bytes per parameter.
OPTIMIZER_BYTES = 12
# Elements of the compute type that a block keeps for backward, per token and unit: 10 of the hidden state (two norms of three,
# q, k, v and what attention gives) and 4 of the MLP, without an attention matrix; in types of 2 bytes 2 more, as norms compute
# in fp32. Counted in transformers' Llama; GPT-2 is within 4 %, Qwen3, with norms of q and k, a sixth above.
HIDDEN_COPIES, NORM_COPIES, INNER_COPIES = 10, 2, 4
# Of a model whose MLP is not known: inner units in hidden ones, as in Llama 3.
USUAL_INNER = 3.5
# DeepSpeed's own, elements: of its buffer for gradients on their way, and of weights that ZeRO-3 may hold whole.
REDUCE_BUCKET, MAX_LIVE = 500_000_000, 1_000_000_000
# Logits, their softmax and their gradient of one chunk, in fp32.
VOCABULARY_COPIES = 3
# Gradients of the vocabulary's matrix that a backward holds at a time beside what it adds them to: of a chunk through the head,
# their sum, and that of the embedding; none where the matrix is fixed. Counted at tiny models and at one of 135 million.
VOCABULARY_GRADIENTS = 3
CPU_KV_CACHE_BYTES = 1 << 30
# Python and the libraries of one process; what the quickstart's engines took beyond weights and cache.
PROCESS_BYTES = 1_200_000_000
# Share of a device or host that may be planned: the rest goes to the driver's context, fragments and the system.
USABLE = 0.95
# Assumed rates of weight edges, bytes per second. host, on one machine: measured on a CPU where vLLM re-packs what it gets.
EDGE_RATES = {"host": 0.5e9, "host between machines": 0.25e9, "nccl": 20e9, "ipc": 100e9}


@dataclass
class Memory:
    """Bytes of one rank.

    Attributes:
        device: on its device, by part. host: on its host. known: False where a model's size is not known.
        peak: most that is on the device at a time.
    """

    device: Counter[str] = field(default_factory=Counter)
    host: int = 0
    known: bool = True
    peak: int = 0

    @property
    def total(self) -> int:
        return sum(self.device.values())

    def add(self, other: Memory) -> None:
        """Both at the same time."""
        self.device.update(other.device)
        self.host += other.host
        self.known &= other.known


@dataclass(frozen=True)
class Work:
    """One forward of a role: `tokens` at most, of which `chunk` reach the vocabulary at once."""

    tokens: int
    chunk: int
    checkpointing: bool = False


@dataclass(frozen=True)
class Learning:
    """What of a role's model learns.

    Attributes:
        trained: parameters that do. fixed: those that do not.
        adapter: of the first, those of a LoRA adapter; None without one.
        base: what names the fixed ones where they may be those of another role, too; see `engines.build`.
    """

    trained: int
    fixed: int = 0
    adapter: int | None = None
    base: str | None = None


def trained(
    shape: ModelShape, dtype: str, ranks: int, zero: Mapping[str, Any], work: Work, *, sums_bytes: int = 4,
    learning: Learning | None = None, base_is_held: bool = False, on_cpu: bool = False,
) -> Memory:  # fmt: skip
    """One rank of a model that is trained by `ranks` ranks: (fixed + n) weights in the compute type, and of the n that learn
    12n bytes of optimizer and `sums_bytes` · n of gradients, each over the ranks as its ZeRO stage says.

    Args:
        dtype: compute type, "bfloat16", "float16" or "float32".
        zero: DeepSpeed's `zero_optimization`.
        sums_bytes: of a gradient sum, per parameter.
        learning: what learns; None: everything.
        base_is_held: the fixed weights are those of another role of the rank, and count there.
        on_cpu: memory that was asked for and never touched counts nothing there.
    """
    if shape.parameters is None:
        return Memory(known=False)
    learning = learning or Learning(shape.parameters)
    n, size, stage = learning.trained, TYPE_BYTES[dtype], int(zero.get("stage", 0))
    memory = Memory()
    weights = (n + (0 if base_is_held else learning.fixed)) * size // (ranks if stage == 3 else 1)
    optimizer = n * OPTIMIZER_BYTES // (ranks if stage >= 1 else 1)
    _put(memory, "weights", weights, _offload(zero, "offload_param") if stage == 3 else None)
    _put(memory, "optimizer", optimizer, _offload(zero, "offload_optimizer"))
    memory.device["gradients"] = n * sums_bytes // (ranks if stage >= 2 else 1)
    memory.device["activations"] = activation_bytes(shape, dtype, work)
    if not learning.fixed:
        memory.device["activations"] += VOCABULARY_GRADIENTS * shape.vocabulary * shape.hidden * size
    bucket = bucket_elements(shape, zero, n if on_cpu else None)
    if stage <= 1 and dtype == "bfloat16" and sums_bytes == 4:
        # DeepSpeed's BF16_Optimizer, which takes these cases, has no bucket, and leaves every parameter, beside the sum, the
        # last backward's own gradient until the step.
        memory.device["gradients"] += n * size
    elif stage == 2:
        memory.device["activations"] += bucket * size  # held for the length of a backward
    else:
        memory.device["gradients"] += bucket * (size if stage == 3 else sums_bytes)
    if stage == 3 and ranks > 1:
        # Weights that a forward gathered stay for its backward, up to a limit, which DeepSpeed counts in elements.
        live = zero.get("stage3_max_live_parameters", MAX_LIVE)
        memory.device["activations"] += min(n + learning.fixed, MAX_LIVE if live == "auto" else int(live)) * size
    return memory


def bucket_elements(shape: ModelShape, zero: Mapping[str, Any], most: int | None) -> int:
    """Elements of the buffer in which gradients are gathered to be reduced; of two where that overlaps with backward.

    Args:
        most: of them that are ever touched, of each buffer; None: all.
    """
    if not zero.get("contiguous_gradients", True):
        return 0
    size = zero.get("reduce_bucket_size", REDUCE_BUCKET)
    size = shape.hidden**2 if size == "auto" else int(size)
    return (size if most is None else min(size, most)) * (2 if zero.get("overlap_comm") and zero.get("stage") != 3 else 1)


def frozen(shape: ModelShape, dtype: str, ranks: int, zero: Mapping[str, Any]) -> Memory:
    """One rank of a model that is only read."""
    if shape.parameters is None:
        return Memory(known=False)
    memory = Memory()
    sharded = int(zero.get("stage", 0)) == 3
    weights = shape.parameters * TYPE_BYTES[dtype] // (ranks if sharded else 1)
    _put(memory, "weights", weights, _offload(zero, "offload_param") if sharded else None)
    return memory


def engine(
    shape: ModelShape, dtype: str, tensor_parallel: int, *, on_cpu: bool, kv_cache_bytes: int | None, share: float,
    device_bytes: int | None,
) -> Memory:  # fmt: skip
    """One device of a rollout engine.

    Args:
        share: of a GPU that the engine may take, weights and KV cache together.
        device_bytes: memory of a GPU; None where it is not known, and neither is the cache then.
    """
    if shape.parameters is None:
        return Memory(known=False)
    weights = shape.parameters * TYPE_BYTES[dtype] // tensor_parallel
    parts = Counter({"vLLM weights": weights})
    if on_cpu:
        parts["KV cache"] = kv_cache_bytes or CPU_KV_CACHE_BYTES
    elif device_bytes is not None:
        parts["KV cache"] = max(0, int(share * device_bytes) - weights)
    return Memory(parts)


def together(trainer: Memory, sampler: Memory, take_turns: bool) -> Memory:
    """Roles and engines of one rank.

    Where they take turns on a device, the states of the one and the weights of the other wait in host memory, and both have
    their weights on the device while these are synced.
    """
    both = Memory()
    both.add(trainer)
    both.add(sampler)
    both.peak = both.total
    if take_turns and trainer.device and sampler.device:
        syncing = trainer.device["weights"] + sampler.device["vLLM weights"]
        both.peak = max(trainer.total, sampler.total, syncing)
        both.host += trainer.total - trainer.device["activations"] + sampler.device["vLLM weights"]
    return both


def activation_bytes(shape: ModelShape, dtype: str, work: Work) -> int:
    """What one forward keeps for backward."""
    size = TYPE_BYTES[dtype]
    inner = shape.inner or int(USUAL_INNER * shape.hidden)
    copies = HIDDEN_COPIES + (NORM_COPIES if size == 2 else 0)
    per_layer = work.tokens * (copies * shape.hidden + INNER_COPIES * inner) * size
    if work.checkpointing:
        kept = shape.layers * work.tokens * shape.hidden * size + per_layer
    else:
        kept = shape.layers * per_layer
    return kept + min(work.chunk, work.tokens) * shape.vocabulary * 4 * VOCABULARY_COPIES


def edge_bytes(shape: ModelShape, dtype: str, adapter: int | None = None) -> int | None:
    """Bytes that a weight edge carries; None: unknown.

    Args:
        adapter: parameters of the adapter that is sent in place of the model.
    """
    sent = shape.parameters if adapter is None else adapter
    return None if sent is None else sent * TYPE_BYTES[dtype]


def edge_seconds(size: int | None, transport: str, same_host: bool) -> float | None:
    """Assumed duration of a weight edge by itself."""
    name = transport if transport != "host" or same_host else "host between machines"
    return None if size is None else size / EDGE_RATES[name]


def _offload(zero: Mapping[str, Any], name: str) -> str | None:
    """'cpu' or 'nvme' where a part is offloaded."""
    section = zero.get(name)
    device = section.get("device", "cpu") if isinstance(section, Mapping) else None
    return device if device in ("cpu", "nvme") else None


def _put(memory: Memory, part: str, size: int, offload: str | None) -> None:
    """On the device, or on the host; what is on NVMe takes neither."""
    if offload is None:
        memory.device[part] = size
    elif offload == "cpu":
        memory.host += size
