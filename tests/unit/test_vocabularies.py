"""Tokenizers that know more tokens than the model beside them has embeddings for."""

from __future__ import annotations

import json
import re

import pytest
from run_files import GOOD, written
from tiny import VOCABULARY, save_tiny_model, tiny_lm, tiny_tokenizer

from comlrl_ds.config import ConfigError
from comlrl_ds.config.model_files import check_vocabulary, embedding_rows, vocabulary_of
from comlrl_ds.config.run_file import load_run_file
from comlrl_ds.engines.loading import load_tokenizer
from comlrl_ds.planning.task_check import check_task
from comlrl_ds.trainers.preference import MADPOTrainer


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A model whose tokenizer got two tokens, and whose embedding did not."""
    folder = save_tiny_model(tmp_path_factory.mktemp("added"), seed=3)
    tokenizer = tiny_tokenizer()
    while len(tokenizer) < VOCABULARY:  # the rows that padding left
        tokenizer.add_tokens([f"<pad{len(tokenizer)}>"])
    tokenizer.save_pretrained(folder)
    assert vocabulary_of(folder) == tokenizer.get_vocab() and embedding_rows(folder) == len(tokenizer)
    check_vocabulary(str(folder), tokenizer.get_vocab(), "")
    tokenizer.add_tokens(["<think>", "</think>"])
    tokenizer.save_pretrained(folder)
    return folder


LINE = r"token '<think>' of the tokenizer has id 320 \(and 1 more\), but '.*' has embeddings for 320 ids, 0 to 319; call model"


def test_plan_and_the_constructor_say_it_in_a_line(folder, tmp_path):
    file = written(tmp_path, GOOD.replace("model: a", f"model: {folder}").replace("model: b", f"model: {folder}"))
    with pytest.raises(ConfigError) as error:
        check_task(load_run_file(file), tmp_path)
    lines = [str(p) for p in error.value.problems if "<think>" in p.message]
    assert [re.match(rf"agents\.{i}\.model: {LINE}", line) is not None for i, line in enumerate(lines)] == [True, True]
    for given in ({"agent_model": str(folder)}, {"agents": [tiny_lm(1), tiny_lm(2)], "tokenizer": None}):
        if "tokenizer" in given:
            from transformers import AutoTokenizer

            given["tokenizer"] = AutoTokenizer.from_pretrained(folder)
        with pytest.raises(ConfigError, match=rf"agents\.0\.model: {LINE}"):
            MADPOTrainer(
                **given, num_agents=2, train_dataset=[{"prompt": "a"}], reward_func=lambda a, b: [0.0], formatters=str,
                rollout={"backend": "transformers"}, run_dir=tmp_path / "run",
            )  # fmt: skip


def test_a_resized_embedding_and_tokens_of_pictures_are_no_problem(folder, tmp_path):
    lm = tiny_lm(3)
    lm.resize_token_embeddings(322)
    lm.save_pretrained(tmp_path)
    for file in folder.glob("tokenizer*"):
        (tmp_path / file.name).write_text(file.read_text())
    check_vocabulary(str(tmp_path), load_tokenizer(str(tmp_path), "").get_vocab(), "")
    # A text model with the tokenizer of its family, as it is published.
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    settings = tmp_path / "tokenizer_config.json"
    settings.write_text(json.dumps(json.loads(settings.read_text()) | {"image_token": "<think>", "eoi_token": "</think>"}))
    check_vocabulary(str(tmp_path), vocabulary_of(tmp_path), "")


def test_rows_are_read_from_the_weights_where_the_config_tells_none(folder, tmp_path):
    config = json.loads((folder / "config.json").read_text())
    del config["vocab_size"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert embedding_rows(tmp_path) is None
    (tmp_path / "model.safetensors").write_bytes((folder / "model.safetensors").read_bytes())
    assert embedding_rows(tmp_path) == VOCABULARY
