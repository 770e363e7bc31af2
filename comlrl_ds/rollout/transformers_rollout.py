"""Rollouts by transformers' `generate`, in this process: where vLLM is not installed, and the reference in tests."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from comlrl_ds.maths.packing import pack_sequences
from comlrl_ds.rollout.adapters import merged
from comlrl_ds.rollout.base import (
    Completion,
    PolicyWeights,
    Request,
    RequestsRefused,
    RolloutEngine,
    RolloutError,
    Sampling,
    SyncReport,
)
from comlrl_ds.rollout.disk import load_model, tensors_on_disk


class TransformersRollout(RolloutEngine):
    """One model copy that generates in batches, each request with a seed of its own.

    Args:
        source: folder of the model.
        dtype: its compute type.
        batch_size: requests per `generate`.
    """

    def __init__(self, source: str, *, dtype: torch.dtype, batch_size: int = 64, device: str = "cpu") -> None:
        from transformers import AutoModelForCausalLM, GenerationConfig

        self.source = self.held = source
        self._model: Any = load_model(AutoModelForCausalLM, source, dtype=dtype).eval().to(device)
        # `generate` takes whatever a call leaves open from here, and so from the folder's files: nothing is inherited.
        self._model.generation_config = GenerationConfig(eos_token_id=None, pad_token_id=0)
        self._batch_size, self._device = batch_size, device
        self._todo: list[tuple[int, Request]] = []
        self._refused: list[tuple[int, str]] = []
        self._sampling = Sampling()

    def submit(self, requests: Sequence[Request], sampling: Sampling) -> None:
        if self._todo:
            raise RolloutError("a submission is still being generated")
        # Requests of one limit, and prompts of similar length, share a batch; `receive` takes from the end.
        self._todo = sorted(enumerate(requests), key=lambda kr: (kr[1].max_new_tokens, len(kr[1].prompt), kr[0]), reverse=True)
        self._sampling = sampling

    def receive(self) -> list[tuple[int, Completion]] | None:
        if not self._todo:
            if refused := self._refused:
                self._refused = []
                raise RequestsRefused(refused)
            return None
        # Rows of a batch go on until the last one ends, and a longer limit's would lead a long prompt beyond the positions.
        limit = self._todo[-1][1].max_new_tokens
        batch: list[tuple[int, Request]] = []
        while self._todo and len(batch) < self._batch_size and self._todo[-1][1].max_new_tokens == limit:
            batch.append(self._todo.pop())
        try:
            return self._answers(batch)
        except Exception:  # whatever transformers raises: only the request that cannot be computed loses its answer
            return [answer for one in batch for answer in self._alone(one)]

    def _alone(self, one: tuple[int, Request]) -> list[tuple[int, Completion]]:
        try:
            return self._answers([one])
        except Exception as error:
            self._refused.append((one[0], f"{type(error).__name__}: {error}"))
            return []

    def _answers(self, batch: Sequence[tuple[int, Request]]) -> list[tuple[int, Completion]]:
        found = zip(*self._generate([r for _, r in batch]))
        return [(k, self._completion(ids, scores, r)) for (k, r), (ids, scores) in zip(batch, found)]

    def _completion(self, ids: list[int], scores: list[float], request: Request) -> Completion:
        ids = ids[: request.max_new_tokens]
        end = next((n for n, t in enumerate(ids) if t in request.stop_ids and n >= self._least(request)), None)
        reason = "length" if end is None else "stop"
        count = len(ids) if end is None else end + 1
        return Completion(tuple(ids[:count]), reason, self.held, tuple(scores[:count]))

    def _least(self, request: Request) -> int:
        return min(self._sampling.min_new_tokens, request.max_new_tokens)

    @torch.no_grad()
    def _generate(self, requests: Sequence[Request]) -> tuple[list[list[int]], list[list[float]]]:
        """[requests][tokens] ids, and their log-probs where they are asked for, up to the longest request's end."""
        from transformers import GenerationConfig, LogitsProcessorList, StoppingCriteriaList

        width = max(len(r.prompt) for r in requests)
        ids = torch.zeros(len(requests), width, dtype=torch.long)
        mask = torch.zeros_like(ids)
        for b, r in enumerate(requests):
            ids[b, width - len(r.prompt) :] = torch.tensor(r.prompt)
            mask[b, width - len(r.prompt) :] = 1
        longest = max(r.max_new_tokens for r in requests)
        generation = GenerationConfig(do_sample=False, max_new_tokens=longest, eos_token_id=None, pad_token_id=0)
        least = [self._least(r) for r in requests]
        sampler = SeededSampler(requests, self._sampling, width, least)
        out = self._model.generate(
            input_ids=ids.to(self._device), attention_mask=mask.to(self._device), generation_config=generation,
            logits_processor=LogitsProcessorList([sampler]),
            stopping_criteria=StoppingCriteriaList([RowStops(requests, width)]),
        )  # fmt: skip
        return out[:, width:].tolist(), sampler.logprobs(out)

    def sync_weights(self, policy: PolicyWeights) -> SyncReport:
        started = time.perf_counter()
        total = 0

        def counted() -> Iterator[tuple[str, Tensor]]:
            nonlocal total
            for name, tensor in policy.tensors() if policy.tensors else tensors_on_disk(policy.source):
                total += tensor.nbytes
                yield name, tensor

        try:
            loaded = self.load_merged(policy.base, dict(counted())) if policy.base else self.load(counted())
            self.check_all_loaded(loaded)
        except ValueError as error:
            raise RolloutError(f"weight sync of {policy.name}: {error}") from None
        self.held = policy.key
        return SyncReport(time.perf_counter() - started, total)

    @torch.no_grad()
    def load(self, tensors: Iterable[tuple[str, Tensor]]) -> set[str]:
        """Copies named tensors in; returns their names. Raises ValueError for a name or shape that the model lacks."""
        own: dict[str, Tensor] = dict(self._model.named_parameters())
        loaded = set()
        for name, tensor in tensors:
            if name not in own:
                raise ValueError(f"the engine has no {name}")
            if own[name].shape != tensor.shape:
                raise ValueError(f"{name} has shape {tuple(tensor.shape)}, not {tuple(own[name].shape)}")
            own[name].copy_(tensor)
            loaded.add(name)
        return loaded

    def load_merged(self, base: str, adapter: Mapping[str, Tensor]) -> set[str]:
        """Copies a base with an adapter in it in; returns the names. Raises ValueError as `load` and `merged` do."""
        return self.load(merged(base, adapter, self._model.dtype))

    def check_all_loaded(self, names: set[str]) -> None:
        """Raises ValueError where a sync left a parameter as it was."""
        if missing := sorted({name for name, _ in self._model.named_parameters()} - names):
            raise ValueError(f"{missing[0]} is missing")

    @torch.no_grad()
    def prompt_logprobs(self, rows: Sequence[Sequence[int]]) -> list[list[float]]:
        batch = pack_sequences(rows)
        logits = self._model(input_ids=batch.ids, position_ids=batch.positions).logits.float().flatten(0, 1)[batch.at]
        scores = logits.log_softmax(-1).gather(-1, batch.target[:, None])[:, 0]
        return [scores[batch.side == k].tolist() for k in range(len(rows))]

    def shutdown(self) -> None:
        self._model = None


class RowStops:
    """Ends each row at a stop token of its own request, or at its own length."""

    def __init__(self, requests: Sequence[Request], prompt_width: int) -> None:
        self._requests, self._width = requests, prompt_width

    def __call__(self, input_ids: Tensor, scores: Any, **_: Any) -> Tensor:
        length = input_ids.shape[1] - self._width
        last = input_ids[:, -1].tolist()
        ended = [t in r.stop_ids or length >= r.max_new_tokens for t, r in zip(last, self._requests)]
        return torch.tensor(ended, device=input_ids.device)


class SeededSampler:
    """Turns greedy search into seeded sampling: argmax(log p + Gumbel noise) is a draw from p.

    Each row has a generator of its own, so a completion depends on its seed alone, never on its batch.
    """

    def __init__(self, requests: Sequence[Request], sampling: Sampling, prompt_width: int, least: Sequence[int]) -> None:
        self._sampling, self._width, self._least = sampling, prompt_width, least
        self._stops = [list(r.stop_ids) for r in requests]
        self._generators = [torch.Generator().manual_seed(r.seed) for r in requests]
        self._scores: Tensor | None = None  # of the token that is being chosen, all of the vocabulary
        self._chosen: list[Tensor] = []

    def logprobs(self, ids: Tensor) -> list[list[float]]:
        """[rows][tokens] log-probs of what was chosen, given prompts and all that was generated; none if not asked for."""
        self._note(ids)
        return torch.stack(self._chosen, 1).tolist() if self._chosen else [[] for _ in ids]

    def _note(self, ids: Tensor) -> None:
        if self._scores is not None:
            self._chosen.append(self._scores.gather(1, ids[:, -1:])[:, 0])
            self._scores = None

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        s = self._sampling
        scores = scores.float()
        self._note(input_ids)
        if s.logprobs:
            self._scores = scores.log_softmax(-1)
        done = input_ids.shape[1] - self._width
        for b, (stops, least) in enumerate(zip(self._stops, self._least)):
            if done < least:
                scores[b, stops] = -torch.inf
        if s.temperature == 0:
            return scores
        scores = scores / s.temperature
        if s.top_k:
            least_kept = scores.topk(min(s.top_k, scores.shape[-1])).values[:, -1:]
            scores = scores.masked_fill(scores < least_kept, -torch.inf)
        if s.top_p < 1:
            ordered, order = scores.sort(descending=True)
            p = ordered.softmax(-1)
            cut = p.cumsum(-1) - p >= s.top_p  # the token that crosses top_p stays
            scores = scores.masked_fill(cut.scatter(-1, order, cut), -torch.inf)
        noise = torch.stack([torch.rand(scores.shape[-1], generator=g) for g in self._generators]).to(scores.device)
        return scores - torch.log(-torch.log(noise.clamp_min(1e-20)))
