"""No field of generation_config.json or config.json changes what is sampled: the run's settings are all there is."""

from __future__ import annotations

import json
import shutil
from itertools import chain

import pytest
import torch
from engine_requests import request
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tiny_models import word_tokenizer

from comlrl_ds.config.errors import ConfigError
from comlrl_ds.engines.loading import stop_ids
from comlrl_ds.rollout.base import Sampling
from comlrl_ds.rollout.transformers_rollout import TransformersRollout

REQUESTS = [request(seed, [5, 6, 7], tokens=6) for seed in range(3)]
SAMPLING = Sampling(temperature=0.9, top_p=0.95, top_k=20)

# Whatever `generate` reads, each with values that would change its answers.
FIELDS = {
    "repetition_penalty": st.floats(0.5, 3.0), "encoder_repetition_penalty": st.floats(0.5, 3.0),
    "num_beams": st.integers(1, 4),
    "num_beam_groups": st.integers(1, 2), "diversity_penalty": st.floats(0, 2), "do_sample": st.booleans(),
    "temperature": st.floats(0.01, 5.0), "top_k": st.integers(0, 5), "top_p": st.floats(0.1, 1.0), "min_p": st.floats(0.0, 0.9),
    "typical_p": st.floats(0.1, 1.0), "epsilon_cutoff": st.floats(0, 0.5), "eta_cutoff": st.floats(0, 0.5),
    "no_repeat_ngram_size": st.integers(0, 3), "bad_words_ids": st.just([[k] for k in range(8, 20)]),
    "suppress_tokens": st.just(list(range(8, 20))), "begin_suppress_tokens": st.just([9, 10]),
    "forced_bos_token_id": st.integers(0, 9), "forced_eos_token_id": st.integers(0, 9), "min_length": st.integers(0, 99),
    "max_length": st.integers(1, 99), "min_new_tokens": st.integers(0, 9), "max_new_tokens": st.integers(1, 9),
    "penalty_alpha": st.floats(0, 1), "num_return_sequences": st.integers(1, 4), "max_time": st.just(0.0),
    "length_penalty": st.floats(-2, 2), "early_stopping": st.booleans(), "use_cache": st.booleans(),
    "sequence_bias": st.just([[[9], -20.0]]), "guidance_scale": st.floats(0.5, 3),
    "prompt_lookup_num_tokens": st.integers(1, 4),
    "return_dict_in_generate": st.booleans(), "output_scores": st.booleans(), "renormalize_logits": st.booleans(),
    "remove_invalid_values": st.booleans(), "exponential_decay_length_penalty": st.just([1, 2.0]),
    "cache_implementation": st.sampled_from(["static", "dynamic"]), "stop_strings": st.just(["a"]),
    "watermarking_config": st.just({"bias": 5.0, "greenlist_ratio": 0.2}), "pad_token_id": st.integers(0, 9),
    "bos_token_id": st.integers(0, 9), "decoder_start_token_id": st.integers(0, 9),
}  # fmt: skip


def sampled(folder) -> list[tuple[int, ...]]:
    engine = TransformersRollout(str(folder), dtype=torch.float32)
    engine.submit(REQUESTS, SAMPLING)
    done = {}
    while (part := engine.receive()) is not None:
        done.update(part)
    return [done[k].ids for k in range(len(REQUESTS))]


@pytest.fixture(scope="module")
def plain(model_folders, tmp_path_factory):
    """A folder without generation_config.json, and what it answers."""
    folder = tmp_path_factory.mktemp("generation") / "plain"
    shutil.copytree(model_folders[0], folder)
    (folder / "generation_config.json").unlink(missing_ok=True)
    return folder, sampled(folder)


@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.fixed_dictionaries({}, optional=FIELDS), st.sampled_from(["generation_config.json", "config.json"]))
def test_samples_follow_from_the_settings_of_the_run_alone(plain, fields, name):
    folder, wanted = plain
    other = folder.parent / "other"
    shutil.rmtree(other, ignore_errors=True)
    shutil.copytree(folder, other)
    file = other / name
    file.write_text(json.dumps((json.loads(file.read_text()) if file.is_file() else {}) | fields))
    assert sampled(other) == wanted


ids = st.one_of(st.none(), st.integers(0, 40), st.lists(st.integers(0, 40), max_size=4))


@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
@given(ids, ids, st.one_of(st.none(), st.integers(0, 40)))
def test_the_stops_are_those_of_all_three_places_together(tmp_path_factory, generation, config, text):
    folder = tmp_path_factory.mktemp("stops")
    tokenizer = word_tokenizer()
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": generation}))
    (folder / "config.json").write_text(json.dumps({"eos_token_id": config, "text_config": {"eos_token_id": text}}))
    listed = [x if isinstance(x, list) else [] if x is None else [x] for x in (generation, config, text)]
    assert stop_ids(str(folder), tokenizer) == tuple(sorted({tokenizer.eos_token_id, *chain(*listed)}))


@pytest.mark.parametrize("content", ["{", "[1]", '"x"', "\xff", '{"eos_token_id": "</s>"}', '{"eos_token_id": [1.5]}'])
@pytest.mark.parametrize("name", ["generation_config.json", "config.json"])
def test_a_file_that_says_nothing_usable_is_named(tmp_path, name, content):
    (tmp_path / name).write_bytes(content.encode("latin-1"))
    with pytest.raises(ConfigError, match=name):
        stop_ids(str(tmp_path), word_tokenizer())
