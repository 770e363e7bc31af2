"""What an engine starts with: its process's environment, its sizes and threads, and the weights that it holds first."""

from __future__ import annotations

import tiny_models

from comlrl_ds.config import RolloutConfig
from comlrl_ds.rollout.environment import engine_environment
from comlrl_ds.rollout.start import Engines, cores, engine_count, max_model_len, model_limits, threads_per_engine

# --- the child's environment
LAUNCHER = {
    "RANK": "3", "LOCAL_RANK": "1", "WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "4", "MASTER_ADDR": "10.0.0.1",
    "MASTER_PORT": "29500", "CROSS_RANK": "0", "LOCAL_SIZE": "4", "TORCHELASTIC_RUN_ID": "x",
    "OMPI_COMM_WORLD_RANK": "3", "SLURM_PROCID": "3",
    "DS_ACCELERATOR": "cpu",
}  # fmt: skip
SECRETS = ("OPENAI_API_KEY", "ANTHROPIC_API_KEY", "AWS_SECRET_ACCESS_KEY", "DB_PASSWORD", "WANDB_API_KEY", "GITHUB_TOKEN")
KEPT = {"HF_HOME": "/hub", "HF_TOKEN": "hub", "PATH": "/bin", "HOME": "/root", "HTTPS_PROXY": "p", "LD_LIBRARY_PATH": "/lib"}


def test_the_child_sees_neither_the_launcher_nor_secrets():
    parent = LAUNCHER | dict.fromkeys(SECRETS, "secret") | KEPT | {"CUDA_VISIBLE_DEVICES": "0,1,2,3", "OMP_NUM_THREADS": "8"}
    before = dict(parent)
    child = engine_environment(parent, threads=1, devices=["2"])
    assert not (LAUNCHER.keys() | set(SECRETS)) & child.keys()
    assert "secret" not in child.values()
    assert KEPT.items() <= child.items()
    assert child["CUDA_VISIBLE_DEVICES"] == "2"
    assert child["OMP_NUM_THREADS"] == "1"
    assert parent == before


def test_devices_and_threads_of_the_child():
    assert engine_environment({}, threads=None, devices=["4", "GPU-uuid"])["CUDA_VISIBLE_DEVICES"] == "4,GPU-uuid"
    on_cpu = engine_environment({"CUDA_VISIBLE_DEVICES": "0", "OMP_NUM_THREADS": "6"}, threads=None, devices=[])
    assert (on_cpu["CUDA_VISIBLE_DEVICES"], on_cpu["OMP_NUM_THREADS"]) == ("", "6")
    assert all(isinstance(value, str) for value in on_cpu.values())
    assert engine_environment({"VLLM_LOGGING_LEVEL": "INFO"}, threads=1, devices=[])["VLLM_LOGGING_LEVEL"] == "INFO"


# --- sizes
def test_engine_sizes(model_folders, tmp_path):
    folder = model_folders[0]
    assert model_limits(folder) == (256, tiny_models.VOCAB)
    assert max_model_len(RolloutConfig(), folder) == 256
    assert max_model_len(RolloutConfig(max_model_len=100), folder) == 100
    gpt2 = tiny_models.save(tmp_path / "gpt2", tiny_models.gpt2(positions=32))
    assert max_model_len(RolloutConfig(max_model_len=100), gpt2) == 32
    assert engine_count(RolloutConfig(engines=3), "cpu", 1) == 3
    assert engine_count(RolloutConfig(engines=1), "cpu", 2) == 2  # every architecture needs one
    assert engine_count(RolloutConfig(backend="transformers"), "cpu", 2) == 2
    assert engine_count(RolloutConfig(), "cuda", 1) == 1
    assert engine_count(RolloutConfig(), "cpu", 1) == min(8, cores())
    assert engine_count(RolloutConfig(threads=10_000), "cpu", 1) == 1
    assert threads_per_engine(RolloutConfig(threads=3), 2) == 3
    assert threads_per_engine(RolloutConfig(), 1) == cores()
    assert threads_per_engine(RolloutConfig(), 10_000) == 1


def test_engines_of_a_run_start_with_the_weights_that_are_needed(model_folders, tmp_path):
    other = tiny_models.save(tmp_path / "gpt2", tiny_models.gpt2(layers=1))
    config = RolloutConfig(backend="transformers", engines=3)
    engines = Engines(config, [*model_folders, other], device="cpu", dtype="float32")
    pool = engines.pool()
    assert [e.held for e in pool.engines] == [model_folders[0], other, model_folders[1]]
    assert engines.pool() is pool
    assert engines.usage() == []
    engines.shutdown()
