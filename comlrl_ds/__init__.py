"""Preference training of collaborating LLM agents on DeepSpeed, with vLLM rollouts.

The public trainers live in `comlrl_ds.trainers.preference`. This file imports nothing heavy: the engine's child
process and the command line start through it.
"""

__version__ = "0.1.0"
