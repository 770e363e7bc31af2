"""Rollouts: completions from policies. The only package that knows vLLM, and only its engine child imports it."""

from comlrl_ds.rollout.base import Completion, PolicyWeights, Request, RolloutEngine, RolloutError, Sampling

__all__ = ["Completion", "PolicyWeights", "Request", "RolloutEngine", "RolloutError", "Sampling"]
