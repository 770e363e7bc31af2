"""Policies out of a run's folder: what is written loads in plain transformers and peft, and says what the live engines say."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from marlhf_runs import trainer as marlhf_trainer
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file
from tasks_for_tests import items, letters, text
from test_command_line import run, run_file
from test_marlhf_heads import HEADS
from tiny import save_tiny_model, tiny_lm, tiny_tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer

from comlrl_ds.cli import main
from comlrl_ds.cluster import call
from comlrl_ds.config.errors import ConfigError
from comlrl_ds.engines.engine import PolicyEngine
from comlrl_ds.rollout.adapters import adapter_on_disk, merged
from comlrl_ds.trainers.export import export_policy
from comlrl_ds.trainers.preference import MADPOConfig, MADPOTrainer

ARGS = {
    "num_agents": 2, "preference_num_candidates": 4, "preference_pairs_per_sample": 1, "max_new_tokens": 8, "temperature": 1.0,
    "top_p": 1.0, "top_k": None, "num_train_epochs": 2, "train_batch_size": 3, "agent_learning_rate": 3e-3, "eval_interval": 0,
}  # fmt: skip
ROWS = [[5, 6, 7, 8, 9, 10], [300, 2, 17]]
LORA = {"r": 3, "lora_alpha": 9, "use_rslora": True, "target_modules": "all-linear"}


def learned(folder: Path, models: list[Path], lora: list[Any], *, stage: int, dtype: str = "float32") -> tuple[str, list[Any]]:
    """A run of two agents with a checkpoint at its very end: (its name, what the live engines say of some rows)."""
    sharding = {"stage": stage, "reduce_bucket_size": 100_000}
    with MADPOTrainer(
        agents=[str(m) for m in models], train_dataset=items()[:5], reward_func=letters, formatters=text, run_dir=folder,
        seed=5, verbose=False, model_config={"dtype": dtype}, rollout={"backend": "transformers", "max_model_len": 128},
        lora=lora, args=MADPOConfig(**ARGS), deepspeed={"zero_optimization": sharding},
    ) as t:  # fmt: skip
        t.train()
        t.save_checkpoint(t.run_dir.checkpoints)
        said = t.cluster.run({role: call(PolicyEngine.token_logprobs, ROWS) for role in t.session.actors})
    newest = max(f.name for f in (folder / "checkpoints").iterdir())
    return newest, [said[f"actor.{i}"] for i in range(2)]


@torch.no_grad()
def plain(lm: Any) -> list[float]:
    scores = [lm.eval()(torch.tensor([row])).logits[0].float().log_softmax(-1) for row in ROWS]
    return [float(z[k, row[k + 1]]) for z, row in zip(scores, ROWS) for k in range(len(row) - 1)]


def flat(listed: Any) -> list[float]:
    return [x for row in listed for x in row]


def whole(folder: Path) -> Any:
    lm, info = AutoModelForCausalLM.from_pretrained(folder, dtype="auto", output_loading_info=True)
    assert not any(info[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    return lm


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    for file in folder.glob("*.safetensors"):
        found |= load_file(file)
    return found


def same(one: Path, other: Path) -> bool:
    """Whether two folders hold the same tensors, bit for bit."""
    a, b = tensors(one), tensors(other)
    return a.keys() == b.keys() and all(a[n].dtype == b[n].dtype and torch.equal(a[n], b[n]) for n in a)


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("stage", [1, 3])
def test_a_checkpoints_policies_are_the_live_ones(tmp_path, stage, tied):
    """Whole weights, an adapter, and the base with it; in fp32, so that only the order of sums differs."""
    base, ended = save_tiny_model(tmp_path / "base", 3, tied=tied), tmp_path / "run/final"
    newest, said = learned(tmp_path / "run", [base, base], [None, LORA], stage=stage)
    start = plain(whole(base))
    lines: list[str] = []
    for agent, merge in ((0, False), (1, False), (1, True)):
        out = export_policy(tmp_path / "run", agent, merge=merge, checkpoint=newest, say=lines.append)
        assert out == tmp_path / "run/export" / (f"agent_{agent}_merged" if merge else f"agent_{agent}")
        adapter = agent == 1 and not merge
        lm = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), out) if adapter else whole(out)
        assert plain(lm) == pytest.approx(flat(said[agent]), abs=1e-5)
        assert max(abs(a - b) for a, b in zip(start, flat(said[agent]))) > 1e-2
        assert AutoTokenizer.from_pretrained(out).get_vocab() == tiny_tokenizer().get_vocab()
        # What the run wrote at its end is the same policy, from the engines' weights instead of the masters.
        again = export_policy(tmp_path / "run", agent, merge=merge, out=tmp_path / f"end{agent}{merge}", say=lines.append)
        assert same(out, again) and (merge or same(out, ended / f"agent_{agent}"))
        if not adapter:
            assert tensors(out).keys() == tensors(base).keys() and ("lm_head.weight" in tensors(out)) is not tied
            assert (out / "generation_config.json").is_file()
    said_of_it = [
        json.loads((f / "adapter_config.json").read_text()) for f in (tmp_path / "run/export/agent_1", ended / "agent_1")
    ]
    assert sorted(said_of_it[0].pop("target_modules")) == sorted(said_of_it[1].pop("target_modules"))
    assert said_of_it[0] == said_of_it[1] and said_of_it[0]["base_model_name_or_path"] == str(base)
    assert any(f"agent 0 from {tmp_path / 'run/checkpoints' / newest}" in line for line in lines)
    assert any(f"agent 0 from {ended / 'agent_0'}" in line for line in lines)
    assert any("adapter in float32, 28 tensors" in line for line in lines)
    assert f"note: {newest} was written later; --checkpoint {newest} takes that" in lines
    save_tiny_model(base, 7, tied=tied)  # other weights in the same place
    for merge in (False, True):
        with pytest.raises(ConfigError, match="has other weights than when"):
            export_policy(tmp_path / "run", 1, merge=merge, out=tmp_path / f"other{merge}", say=str)
        assert not (tmp_path / f"other{merge}").exists()


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_compute_types_files_of_the_base_and_adapters_that_go_on(tmp_path, stage):
    """bf16: masters rounded as the engine rounds them, a base in several files, an agent that goes on from a PEFT folder."""
    base = tmp_path / "base"
    tiny_lm(4, tied=False).save_pretrained(base, max_shard_size="100KB")
    tiny_tokenizer().save_pretrained(base)
    files = {f.name for f in base.glob("*.safetensors")}
    given = get_peft_model(AutoModelForCausalLM.from_pretrained(base), LoraConfig(r=2, lora_alpha=8, target_modules=["q_proj"]))
    for name, p in given.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(p, 0, 0.1)
    given.save_pretrained(tmp_path / "adapter")
    newest, _ = learned(tmp_path / "run", [base, tmp_path / "adapter"], [None, None], stage=stage, dtype="bfloat16")
    ended = tmp_path / "run/final"

    out = export_policy(tmp_path / "run", 0, checkpoint=newest, say=str)
    assert same(out, ended / "agent_0") and whole(out).dtype == torch.bfloat16
    assert len(files) > 1 and {f.name for f in out.glob("*.safetensors")} == files
    masters = tensors(export_policy(tmp_path / "run", 0, checkpoint=newest, out=tmp_path / "fp32", dtype="float32", say=str))
    rounded = tensors(out)
    assert all(t.dtype == torch.float32 and torch.equal(t.bfloat16(), rounded[n]) for n, t in masters.items())
    assert any(not torch.equal(t, rounded[n].float()) for n, t in masters.items())
    assert whole(tmp_path / "fp32").dtype == torch.float32

    adapter = export_policy(tmp_path / "run", 1, checkpoint=newest, say=str)
    assert same(adapter, ended / "agent_1") and not same(adapter, tmp_path / "adapter")
    for source, dtype in ((newest, None), (None, "float32")):
        found = export_policy(
            tmp_path / "run", 1, merge=True, checkpoint=source, dtype=dtype, out=tmp_path / f"m{dtype}", say=str
        )
        numbers = getattr(torch, dtype or "bfloat16")
        wanted = dict(merged(str(base), dict(adapter_on_disk(str(adapter))), numbers))
        held = tensors(found)
        assert held.keys() == wanted.keys() and all(torch.equal(held[n], t) for n, t in wanted.items())
        assert whole(found).dtype == numbers


def test_a_value_head_stands_beside_the_weights(tmp_path, tiny_model):
    args = HEADS | {"num_train_epochs": 1}
    with marlhf_trainer(tmp_path / "run", tiny_model, args=args, lora=[None, {"r": 2}]) as t:
        t.train()
        t.save_checkpoint(tmp_path / "elsewhere")
    (checkpoint,) = (tmp_path / "elsewhere").iterdir()
    for agent, merge in ((0, False), (1, False), (1, True)):
        out = export_policy(tmp_path / "run", agent, merge=merge, checkpoint=checkpoint, say=str)
        ended = tmp_path / f"run/final/agent_{agent}"
        head, wanted = (load_file(f / "value_head/scalar_head.safetensors") for f in (out, ended))
        assert head.keys() == wanted.keys() and all(torch.equal(head[n], t) for n, t in wanted.items())
        if agent == 0 or merge:
            whole(out)


# --- the command, and what it refuses
@pytest.fixture(scope="module")
def cut_off(tmp_path_factory):
    """A run that has not come to its end, with two checkpoints; agent 1 learns an adapter. (folder, run file)"""
    folder = tmp_path_factory.mktemp("cut_off")
    base = save_tiny_model(folder / "base", 6)
    agents = [{"model": str(base)}, {"model": str(base), "lora": {}}]
    file = run_file(folder, base, agents=agents, run__checkpoint_every_updates=1, args__eval_interval=0)
    done = run("train", str(file), cwd=folder)
    assert done.returncode == 0, done.stderr
    shutil.rmtree(folder / "run/final")
    (folder / "run/complete").unlink()
    return folder, file


def said(capsys: Any, *words: Any) -> str:
    """The one problem that the command ends with."""
    assert main(["export", *map(str, words)]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "comlrl-ds: 1 problem" and len(lines) == 2
    return lines[1]


def test_the_newest_checkpoint_serves_where_the_run_has_not_ended(cut_off, tmp_path):
    folder, _ = cut_off
    names = sorted(f.name for f in (folder / "run/checkpoints").iterdir())
    assert len(names) == 2
    command = [sys.executable, "-W", "ignore", "-m", "comlrl_ds", "export", "run", "--agent", "1", "--merge", "--out"]
    words = dict(os.environ) | {"OMP_NUM_THREADS": "1", "COLUMNS": "200"}
    for out in (tmp_path / "new", tmp_path / "old"):
        more = ["--checkpoint", names[0]] if out.name == "old" else []
        done = subprocess.run([*command, out, *more], cwd=folder, env=words, capture_output=True, text=True, timeout=100)
        assert done.returncode == 0, done.stderr
        name = names[0] if out.name == "old" else names[1]
        assert done.stdout.splitlines() == [
            f"agent 1 from {folder / 'run/checkpoints' / name}", f"{out}: model in float32, 20 tensors, read again and equal",
        ]  # fmt: skip
        whole(out)
    assert not same(tmp_path / "new", tmp_path / "old")


def test_what_cannot_be_exported_is_one_line(cut_off, tmp_path, capsys):
    home = shutil.copytree(cut_off[0] / "run", tmp_path / "run")
    out = ("--out", tmp_path / "out")
    assert "no such run" in said(capsys, tmp_path / "nowhere", "--agent", 0)
    assert "no such run" in said(capsys, tmp_path, "--agent", 0) and "config.yaml" in said(capsys, tmp_path, "--agent", 0)
    for agent in (-1, 2):
        assert f"--agent: {agent}, but" in said(capsys, home, f"--agent={agent}")
    assert "has agents 0 to 1" in said(capsys, home, "--agent", 7)
    assert "no adapter" in said(capsys, home, "--agent", 0, "--merge")
    assert "no complete checkpoint" in said(capsys, home, "--agent", 0, *out, "--checkpoint", "checkpoint-999999")
    (tmp_path / "full").mkdir()
    (tmp_path / "full/mine").write_text("…")
    assert "not empty" in said(capsys, home, "--agent", 0, "--out", tmp_path / "full")
    assert (tmp_path / "full/mine").read_text() == "…"
    assert not list(tmp_path.glob(".*")) and not (home / "export").exists()

    with open(next((home / "checkpoints").glob("*/actor.0/*_optim_states.pt")), "r+b") as f:  # one bit of the content
        f.seek(-2000, os.SEEK_END)
        byte = f.read(1)[0]
        f.seek(-1, os.SEEK_CUR)
        f.write(bytes([byte ^ 1]))
    damaged = Path(f.name).parent.parent
    assert "has changed" in said(capsys, home, "--agent", 0, *out, "--checkpoint", damaged)
    files = sorted((home / "checkpoints").glob("*/actor.1/*_optim_states.pt"))
    os.truncate(files[-1], 100)
    assert "is damaged" in said(capsys, home, "--agent", 1, *out, "--checkpoint", files[-1].parent.parent)
    assert main(["export", str(home), "--agent", "1", *map(str, out)]) == 0  # the older one
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("skipped: ") and "is damaged" in lines[0] and files[0].parent.parent.name in lines[1]
    os.truncate(files[0], 100)
    assert main(["export", str(home), "--agent", "1"]) == 2
    assert "nothing to export" in capsys.readouterr().err
    (home / "config.yaml").write_text("agents: 3")
    assert "is not what a run writes" in said(capsys, home, "--agent", 0)


def test_a_base_that_is_another_than_then(cut_off, tmp_path, capsys):
    home = shutil.copytree(cut_off[0] / "run", tmp_path / "run")
    base = shutil.copytree(cut_off[0] / "base", tmp_path / "base")
    config = yaml.safe_load((home / "config.yaml").read_text())
    for section in config["agents"]:
        section["model"] = str(base)
    (home / "config.yaml").write_text(yaml.safe_dump(config))
    out = ("--out", tmp_path / "out")
    save_tiny_model(base, 7)
    assert "has other weights than when" in said(capsys, home, "--agent", 1, *out)
    save_tiny_model(base, 7, layers=1)
    assert "has no such tensor: model.layers.1." in said(capsys, home, "--agent", 0, *out)
    save_tiny_model(base, 7, layers=3)
    assert "transformers cannot load" in said(capsys, home, "--agent", 0, *out)
    assert not (tmp_path / "out").exists() and not list(tmp_path.glob(".*"))
    shutil.rmtree(base)
    assert "agents.0.model: no folder" in said(capsys, home, "--agent", 0, *out)


def test_another_number_of_ranks_or_stage_ends_with_the_way_out(cut_off, tmp_path):
    """CASES 27."""
    folder, file = cut_off
    home = shutil.copytree(folder / "run", tmp_path / "run")
    newest = max((home / "checkpoints").iterdir())
    manifest = json.loads((newest / "manifest.json").read_text())
    manifest["state"]["world"]["actor.0"] = [2, 2]
    (newest / "manifest.json").write_text(json.dumps(manifest))
    done = run("train", str(file), f"run.dir={home}", cwd=folder)
    assert done.returncode == 2 and "Traceback" not in done.stderr, done.stderr
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("  ")]
    assert line.startswith("  placement: actor.0 was on 2 ranks at ZeRO-2") and "is on 1 at ZeRO-2 now" in line
    assert f"comlrl-ds export RUN --agent i --checkpoint {newest}" in line
    export_policy(home, 0, checkpoint=newest, say=str)  # as it says, whatever the ranks
