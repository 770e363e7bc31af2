"""What an engine starts with: its process's environment, its sizes and threads, and the weights that it holds first."""

from __future__ import annotations

import tiny_models

from comlrl_ds.cluster import join
from comlrl_ds.cluster.hostfile import slots_of_one_host
from comlrl_ds.cluster.layout import Layout, RolloutPlace
from comlrl_ds.cluster.placement import resolve_placement
from comlrl_ds.config import RolloutConfig
from comlrl_ds.rollout.environment import engine_environment
from comlrl_ds.rollout.start import Engines, cores, engine_places, max_model_len, model_limits

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


def layout_of(ranks: int) -> Layout:
    roles, slots = ["actor.0", "actor.1"], slots_of_one_host(ranks)
    return resolve_placement(None, slots, agents=2, roles=roles, devices={}, device_kind="cpu")


def test_number_of_engines(model_folders, tmp_path):
    gpt2 = tiny_models.save(tmp_path / "gpt2", tiny_models.gpt2(positions=32))
    one_shape, two_shapes = [model_folders[0]] * 2, [model_folders[0], gpt2]

    def count(config: RolloutConfig, device="cpu", sources=one_shape, ranks=1) -> int:
        return len(engine_places(config, layout_of(ranks), sources, device))

    assert count(RolloutConfig(engines=3)) == 3
    assert count(RolloutConfig(engines=1), sources=two_shapes) == 2  # every architecture needs one
    assert count(RolloutConfig(backend="transformers"), sources=two_shapes) == 2
    assert count(RolloutConfig(backend="transformers")) == 1
    assert count(RolloutConfig(), "cuda") == 1
    assert count(RolloutConfig()) == min(8, cores())
    assert count(RolloutConfig(threads=10_000)) == 1
    assert count(RolloutConfig(), ranks=3) == 3  # every rank hosts one


def test_engines_of_a_run_start_with_the_weights_that_are_needed(model_folders, tmp_path):
    other = tiny_models.save(tmp_path / "gpt2", tiny_models.gpt2(layers=1))
    config = RolloutConfig(backend="transformers", engines=3)
    cluster = join()
    cluster.layout = Layout(tuple(slots_of_one_host(1)), {"all": (0,)}, {}, RolloutPlace(("all",)))
    engines = Engines(config, [*model_folders, other], cluster=cluster, device="cpu", dtype="float32")
    pool = engines.pool()
    assert [e.held for e in pool.engines] == [model_folders[0], other, model_folders[1]]
    assert engines.pool() is pool
    assert engines.usage() == []
    engines.shutdown()
