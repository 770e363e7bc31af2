"""What vLLM cannot do with a model is a line before it is started; the tables are those of the vLLM that is installed."""

from __future__ import annotations

import ast
import importlib.util
from pathlib import Path

import pytest
from run_files import GOOD, written
from tiny import save_tiny_model
from transformers import GPT2Config, GPT2LMHeadModel

from comlrl_ds.config import ConfigError
from comlrl_ds.config.lora import LoraSettings
from comlrl_ds.config.run_file import RolloutConfig, load_run_file
from comlrl_ds.planning.plan import plan_run
from comlrl_ds.rollout.adapter_room import adapter_room
from comlrl_ds.rollout.vllm_models import CPU_HEAD_SIZES, WITHOUT_ADAPTERS, architecture_of, check_head_size

found = importlib.util.find_spec("vllm")  # read as text: importing it takes long, and changes the process
VLLM = Path(found.origin).parent if found and found.origin else None
installed = pytest.mark.skipif(VLLM is None, reason="vLLM is not installed")


def parsed(name: str) -> ast.Module:
    return ast.parse((VLLM / name).read_text())


class Classes:
    """Which of vLLM's model classes take adapters: those that inherit the interface, in whatever file."""

    def __init__(self) -> None:
        self._files: dict[str, tuple[dict, dict]] = {}

    def _file(self, module: str) -> tuple[dict, dict]:
        if module not in self._files:
            nodes = list(ast.walk(parsed(f"model_executor/models/{module}.py")))
            own = {n.name: [ast.unparse(b) for b in n.bases] for n in nodes if isinstance(n, ast.ClassDef)}
            taken = {
                a.asname or a.name: ((n.module or "").rpartition(".")[2], a.name)
                for n in nodes if isinstance(n, ast.ImportFrom) for a in n.names
            }  # fmt: skip
            self._files[module] = own, taken
        return self._files[module]

    def adapts(self, module: str, name: str) -> bool:
        if name == "SupportsLoRA":
            return True
        if not (VLLM / f"model_executor/models/{module}.py").is_file():
            return False
        own, taken = self._file(module)
        if name in own:
            return any(self.adapts(module, base) for base in own[name])
        return name in taken and self.adapts(*taken[name])


@installed
def test_the_tables_are_those_of_the_installed_vllm():
    registry = parsed("model_executor/models/registry.py")
    table = next(
        ast.literal_eval(n.value) for n in registry.body
        if isinstance(n, ast.Assign) and getattr(n.targets[0], "id", "") == "_TEXT_GENERATION_MODELS"
    )  # fmt: skip
    classes = Classes()
    without = {name for name, place in table.items() if not classes.adapts(*place[:2])}
    assert without == WITHOUT_ADAPTERS and table.keys() > {"LlamaForCausalLM", "Qwen2ForCausalLM"}
    cpu = ast.walk(parsed("v1/attention/backends/cpu_attn.py"))
    sizes = next(n for n in cpu if isinstance(n, ast.FunctionDef) and n.name == "get_supported_head_sizes")
    assert tuple(ast.literal_eval(sizes.body[-1].value)) == CPU_HEAD_SIZES


@pytest.fixture(scope="module")
def gpt2(tmp_path_factory):
    """A GPT-2 whose heads have size 8."""
    folder = tmp_path_factory.mktemp("gpt2")
    GPT2LMHeadModel(GPT2Config(vocab_size=32, n_positions=64, n_embd=16, n_layer=1, n_head=2)).save_pretrained(folder)
    return folder


def test_plan_says_what_vllm_cannot_do_and_what_to_write(gpt2, tmp_path):
    text = GOOD.replace("model: a", f"model: {gpt2}").replace("model: b", f"model: {gpt2}")
    with pytest.raises(ConfigError) as error:
        plan_run(load_run_file(written(tmp_path, text), ["rollout.backend=vllm"]), tmp_path)
    lines = [str(p) for p in error.value.problems if "attention heads" in p.message]
    assert [line.startswith(f"agents.{i}.model: ") for i, line in enumerate(lines)] == [True, True]
    assert "have size 8, and vLLM on a CPU computes sizes 32, 64" in lines[0]
    assert lines[0].endswith("write rollout.backend: transformers")


def test_which_models_are_refused(gpt2, tmp_path):
    llama = save_tiny_model(tmp_path / "llama", 1)
    vllm, lora = RolloutConfig(backend="vllm", lora="adapter"), [LoraSettings(r=4)]
    assert architecture_of(str(gpt2)) == "GPT2LMHeadModel" and architecture_of(str(tmp_path)) == ""
    with pytest.raises(
        ConfigError, match=r"rollout\.lora: .*no adapters beside a GPT2LMHeadModel, which agent 0 is; write auto"
    ):
        adapter_room(vllm, "cpu", [str(gpt2)], lora, comparators=False)
    assert adapter_room(vllm, "cpu", [str(llama)], lora, comparators=False) is not None
    assert adapter_room(RolloutConfig(backend="vllm"), "gpu", [str(gpt2)], lora, comparators=False) is None
    check_head_size(vllm, "gpu", str(gpt2), "")
    check_head_size(RolloutConfig(backend="transformers"), "cpu", str(gpt2), "")
    check_head_size(vllm, "cpu", str(llama), "")
    with pytest.raises(ConfigError, match="have size 8"):
        check_head_size(vllm, "cpu", str(gpt2), "")
