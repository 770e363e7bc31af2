"""Which weights a folder holds."""

from __future__ import annotations

import hashlib

import torch
from safetensors.torch import load_file, save_file

from comlrl_ds.engines.fingerprint import hash_on_disk, weights_hash


def test_equal_weights_have_equal_numbers_in_any_order(model_folders, tmp_path):
    tensors = [("a", torch.arange(6.0).reshape(2, 3)), ("b", torch.ones(3))]
    number = weights_hash(tensors, "float32")
    assert number == weights_hash(reversed(tensors), "float32") and 0 < number < 2**48
    # By hand: little-endian bytes of each tensor after its name.
    digests = [hashlib.blake2b(n.encode() + t.numpy().tobytes(), digest_size=6).digest() for n, t in tensors]
    assert number == sum(int.from_bytes(d, "big") for d in digests) % 2**48
    assert weights_hash([("a", tensors[0][1]), ("c", torch.ones(3))], "float32") != number
    changed = torch.ones(3)
    changed[2] += 1e-6
    assert weights_hash([tensors[0], ("b", changed)], "float32") != number
    # In the engines' type what differs below its precision is equal.
    assert weights_hash([tensors[0], ("b", changed)], "bfloat16") == weights_hash(tensors, "bfloat16")


def test_a_folder_and_its_tensors(model_folders, tmp_path):
    first, second = (hash_on_disk(folder, "float32") for folder in model_folders)
    assert first != second == hash_on_disk(model_folders[1], "float32")
    import shutil

    copy = tmp_path / "copy"
    shutil.copytree(model_folders[0], copy)
    assert hash_on_disk(str(copy), "float32") == first
    file = next(copy.glob("*.safetensors"))
    content = load_file(file)
    name = sorted(content)[0]
    save_file(content | {name: content[name] * 1.001}, file, {"format": "pt"})
    assert hash_on_disk(str(copy), "float32") != first
