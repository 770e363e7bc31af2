"""Models in folders: which of them have one architecture, and their tensors in a fixed order."""

from __future__ import annotations

import tiny_models
import torch

from comlrl_ds.rollout.disk import shape_of, tensors_on_disk


def test_shapes_of_folders(tmp_path, model_folders):
    assert shape_of(model_folders[0]) == shape_of(model_folders[1])
    wider = tiny_models.save(tmp_path / "wider", tiny_models.llama(0, vocab=80, layers=1))
    deeper = tiny_models.save(tmp_path / "deeper", tiny_models.llama(0, layers=2))
    low = tiny_models.save(tmp_path / "low", tiny_models.llama(0, layers=1).bfloat16())
    assert len({shape_of(f) for f in (model_folders[0], wider, deeper)}) == 3
    assert shape_of(low) == shape_of(model_folders[0])  # an engine converts what it is given
    assert shape_of("some/repository") == "some/repository"


def test_tensors_on_disk_come_in_a_fixed_order_whatever_the_files(tmp_path):
    lm = tiny_models.llama(0)
    lm.save_pretrained(tmp_path / "one")
    lm.save_pretrained(tmp_path / "many", max_shard_size="20KB")
    assert len(list((tmp_path / "many").glob("*.safetensors"))) > 1
    one, many = dict(tensors_on_disk(str(tmp_path / "one"))), dict(tensors_on_disk(str(tmp_path / "many")))
    assert one.keys() == many.keys() == dict(lm.named_parameters()).keys()
    assert all(torch.equal(one[name], p) and torch.equal(many[name], p) for name, p in lm.named_parameters())
    assert [n for n, _ in tensors_on_disk(str(tmp_path / "many"))] == [n for n, _ in tensors_on_disk(str(tmp_path / "many"))]
