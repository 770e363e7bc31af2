"""launch/*.sh without machines: the command and environment that they end in, as a stand-in for `deepspeed` records them."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import time
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

import pytest

from comlrl_ds.cluster.hostfile import slots_of_hostfile
from comlrl_ds.cluster.launch import Launch, read_launch

RECORD = """#!/bin/sh
here=$(dirname "$0")
printf '%s\\0' "$@" > "$here/argv"
env -0 > "$here/env"
"""
HOSTS = "# two machines\n\n10.0.0.1 slots=2\n10.0.0.2 slots=1  # the small one\n"
AWKWARD = [
    "run.seed=2", 'placement={"groups":{"a":[0,1],"b":[2]}}', "run.dir=two words", "x='single'", "u=", "ü=ö",
    'y="a b" $HOME `id` \\" \\$ \\\\ \'c\'', "z=$HOME`id`\\n*?;&|<>()#!~", "w=50%h 100%n %% %d", "v=%h%n",
]  # fmt: skip


class Copy:
    """A copy of the scripts with stand-ins for set-up and programs, and a working directory with a run file."""

    def __init__(self, folder: Path, root: Path) -> None:
        self.launch, self.bin, self.cwd = folder / "repo" / "launch", folder / "repo" / ".venv" / "bin", folder / "cwd"
        for made in (self.launch, self.bin, self.cwd):
            made.mkdir(parents=True)
        for name in ("local.sh", "multinode.sh"):
            shutil.copy(root / "launch" / name, self.launch)
        self.program(self.launch / "setup.sh", "#!/bin/sh\necho setup: .venv is up to date\n")
        self.program(self.bin / "deepspeed", RECORD)
        self.program(self.bin / "pdsh", "#!/bin/sh\nexit 1\n")
        (self.cwd / "run.yaml").write_text("trainer: madpo\n")
        (self.cwd / "hosts").write_text(HOSTS)

    def program(self, file: Path, text: str) -> None:
        file.write_text(text)
        file.chmod(0o755)

    def run(self, script: str, *words: str, **environment: str) -> subprocess.CompletedProcess[str]:
        outer = {k: os.environ[k] for k in ("HOME", "LANG") if k in os.environ}
        full = outer | {"PATH": f"{self.bin}:{os.environ['PATH']}"} | environment
        command = ["bash", str(self.launch / script), *words]
        return subprocess.run(command, cwd=self.cwd, env=full, capture_output=True, text=True, timeout=60, check=False)

    @property
    def argv(self) -> list[str]:
        return (self.bin / "argv").read_text().split("\0")[:-1]

    @property
    def env(self) -> dict[str, str]:
        return dict(e.split("=", 1) for e in (self.bin / "env").read_text().split("\0")[:-1])

    @property
    def handed_on(self) -> dict[str, str]:
        """.deepspeed_env, read as strictly as DeepSpeed does."""
        lines = (self.cwd / ".deepspeed_env").read_text().splitlines()
        assert all(re.fullmatch(r"[A-Za-z_]\w*=.*", line) for line in lines)
        return dict(line.split("=", 1) for line in lines)


@pytest.fixture
def copy(tmp_path: Path, root: Path) -> Copy:
    return Copy(tmp_path, root)


def test_local_starts_ranks_here(copy):
    done = copy.run("local.sh", "3", "run.yaml", *AWKWARD, MASTER_PORT="29899", COMLRL_DS_DEVICE="cpu")
    assert done.returncode == 0, done.stderr
    ends = ["--no_local_rank", "--module", "comlrl_ds", "train", "run.yaml", *AWKWARD]
    assert copy.argv == ["--num_gpus", "3", "--master_port", "29899", *ends]
    assert copy.env["DS_ACCELERATOR"] == "cpu" and copy.env["OMP_WAIT_POLICY"] == "PASSIVE"
    first, shown = done.stdout.splitlines()
    assert first == "setup: .venv is up to date"
    assert shown.startswith("+ env OMP_WAIT_POLICY=PASSIVE DS_ACCELERATOR=cpu deepspeed --num_gpus 3 --master_port 29899 ")
    # What is shown can be pasted.
    (copy.bin / "argv").unlink()
    again = {"PATH": f"{copy.bin}:{os.environ['PATH']}"}
    subprocess.run(["bash", "-c", shown.removeprefix("+")], cwd=copy.cwd, env=again, check=True, timeout=60)
    assert copy.argv[6:] == ends[2:]


def test_local_finds_a_port_and_leaves_a_gpu_and_the_user_s_choices_alone(copy):
    ports = set()
    for _ in range(2):
        assert copy.run("local.sh", "1", "run.yaml", COMLRL_DS_DEVICE="gpu", OMP_WAIT_POLICY="ACTIVE").returncode == 0
        ports.add(copy.argv[3])
        assert "DS_ACCELERATOR" not in copy.env and copy.env["OMP_WAIT_POLICY"] == "ACTIVE"
    assert all(1024 < int(p) < 65536 and p != "29500" for p in ports)
    assert copy.run("local.sh", "1", "run.yaml", DS_ACCELERATOR="xpu").returncode == 0
    assert copy.env["DS_ACCELERATOR"] == "xpu"


def test_local_ends_the_ranks_on_sigterm_and_hands_on_the_exit_code(copy):
    """The stand-in has a child, as DeepSpeed's runner has, which does not tell it of a SIGTERM."""
    child = "trap 'exit 7' TERM; touch up; while :; do sleep 0.05; done"
    copy.program(copy.bin / "deepspeed", f'#!/bin/sh\nsh -c "{child}" &\nwait $!\n')
    command = ["bash", str(copy.launch / "local.sh"), "2", "run.yaml"]
    process = subprocess.Popen(command, cwd=copy.cwd, stdout=subprocess.DEVNULL, start_new_session=True)
    try:
        end = time.monotonic() + 30
        while not (copy.cwd / "up").exists() and time.monotonic() < end:
            time.sleep(0.02)
        process.terminate()
        assert process.wait(10) == 7
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


@pytest.mark.parametrize(
    ("words", "environment", "said"),
    [
        (["local.sh"], {}, "usage: launch/local.sh N run.yaml"),
        (["local.sh", "3"], {}, "usage: launch/local.sh N run.yaml"),
        (["local.sh", "run.yaml", "3"], {}, "'run.yaml' is no number of ranks"),
        (["local.sh", "0", "run.yaml"], {}, "'0' is no number of ranks"),
        (["local.sh", "2", "none.yaml"], {}, "there is no run file 'none.yaml'"),
        (["local.sh", "2", "run.yaml"], {"MASTER_PORT": "x"}, "MASTER_PORT 'x' is not a number"),
        (["multinode.sh", "hosts"], {}, "usage: launch/multinode.sh HOSTFILE run.yaml"),
        (["multinode.sh", "none", "run.yaml"], {}, "there is no hostfile 'none'"),
        (["multinode.sh", "hosts", "none.yaml"], {}, "there is no run file 'none.yaml'"),
        (["multinode.sh", "run.yaml", "hosts"], {}, "run.yaml: 'trainer: madpo' is not understood"),
        (["multinode.sh", "hosts", "run.yaml"], {"SSH_PORT": "ssh"}, "SSH_PORT 'ssh' is not a number"),
        (["multinode.sh", "hosts", "run.yaml"], {"DS_ENV_FILE": ".other"}, "DS_ENV_FILE is set"),
        (["multinode.sh", "hosts", "run.yaml", "a=1\n2"], {}, "a setting with a line break"),
        (["multinode.sh", "hosts", "run.yaml"], {"NCCL_DEBUG_FILE": "$HOME/x"}, "NCCL_DEBUG_FILE has a quote, $,"),
    ],
)
def test_a_mistake_ends_in_one_line(copy, words, environment, said):
    done = copy.run(*words, **environment)
    assert done.returncode == 2
    assert said in done.stderr and done.stderr.count("\n") == 1
    assert not (copy.bin / "argv").exists()


def test_a_hostfile_without_machines_and_a_foreign_environment_file_are_refused(copy):
    (copy.cwd / "empty").write_text("# none yet\n\n")
    assert "empty lists no machine" in copy.run("multinode.sh", "empty", "run.yaml").stderr
    ours = copy.cwd / ".deepspeed_env"
    ours.write_text("NCCL_DEBUG=INFO\n")
    done = copy.run("multinode.sh", "hosts", "run.yaml")
    assert done.returncode == 2 and "was not written by this script" in done.stderr
    assert ours.read_text() == "NCCL_DEBUG=INFO\n" and not (copy.bin / "argv").exists()


def test_multinode_starts_the_machines_and_hands_on_what_they_need(copy):
    given = {
        "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29898", "SSH_PORT": "2222", "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "3",
        "PYTHONPATH": "/a b:/c", "HF_HOME": "/hf", "NCCL_DEBUG_FILE": "/log/%h.%p", "GLOO_X": "", "COMLRL_DS_TRACEBACK": "1",
        "WANDB_API_KEY": "no", "HF_TOKEN": "no", "VLLM_API_KEY": "no", "NCCL_SECRET": "no", "MLFLOW_TRACKING_PASSWORD": "no",
        "UNRELATED": "no", "VLLM_X_CREDENTIALS": "no", "GLOO_access_token": "no",
    }  # fmt: skip
    for _ in range(2):  # the second time it finds its own file
        done = copy.run("multinode.sh", "hosts", "run.yaml", "run.seed=2", **given)
        assert done.returncode == 0, done.stderr
    start = [
        "--hostfile",
        "hosts",
        "--force_multi",
        "--master_port",
        "29898",
        "--master_addr",
        "10.0.0.1",
        "--ssh_port",
        "2222",
    ]
    assert copy.argv == [*start, "--no_local_rank", "--module", "comlrl_ds", "train", "run.yaml", "run.seed=2"]
    path = copy.handed_on.pop("PATH")
    assert path.startswith(f"{copy.bin}:")
    assert {k: v for k, v in copy.handed_on.items() if k != "PATH"} == {
        "COMLRL_DS_ENV_FILE": "launch/multinode.sh", "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "3",
        "PYTHONPATH": "/a b:/c", "HF_HOME": "/hf", "NCCL_DEBUG_FILE": "/log/%%h.%%p", "GLOO_X": "", "COMLRL_DS_TRACEBACK": "1",
        "TOKENIZERS_PARALLELISM": "false", "OMP_WAIT_POLICY": "PASSIVE",
    }  # fmt: skip
    # DeepSpeed itself would hand these on.
    assert not {"MLFLOW_TRACKING_PASSWORD", "NCCL_SECRET"} & set(copy.env)
    shown = done.stdout.splitlines()[-1]
    assert shown.startswith("+ env -u MLFLOW_TRACKING_PASSWORD -u NCCL_SECRET deepspeed --hostfile hosts ")
    assert not [f for f in copy.cwd.iterdir() if f.name not in ("hosts", "run.yaml", ".deepspeed_env")]


def test_settings_and_environment_reach_the_nodes_as_they_are(copy):
    """Through DeepSpeed's own quoting, pdsh's replacements and a node's shell."""
    from deepspeed.launcher.multinode_runner import PDSHRunner

    given = {"PYTHONPATH": "/a b:/c;(d)&e'f", "NCCL_DEBUG_FILE": "/log/%h.%p", "GLOO_X": ""}
    done = copy.run("multinode.sh", "hosts", "run.yaml", *AWKWARD, **given)
    assert done.returncode == 0, done.stderr
    k = copy.argv.index("comlrl_ds")
    options = SimpleNamespace(
        user_script=copy.argv[k], user_args=copy.argv[k + 1 :], ssh_port=None, launcher_args="", venv_script=None,
        no_python=False, module=True, no_local_rank=True, save_pid=False, enable_each_rank_log="None",
        master_addr="a", master_port=1,
    )  # fmt: skip
    runner = PDSHRunner(options, "WORLD")
    for name, value in copy.handed_on.items():
        runner.add_export(name, value)
    command, _, _ = runner.get_cmd({}, {"10.0.0.1": [0, 1]})
    first = next(i for i, word in enumerate(command) if word.startswith("export "))
    words = re.sub(r"cd \S+; \S+ -u -m deepspeed.launcher.launch", f"{copy.bin}/deepspeed", " ".join(command[first:]))
    replaced = re.sub("%([hn%])", lambda m: {"h": "HOST", "n": "7", "%": "%"}[m[1]], words)
    subprocess.run(["sh", "-c", replaced], check=True, timeout=60, env={"PATH": os.environ["PATH"]})
    assert copy.argv[copy.argv.index("comlrl_ds") + 1 :] == ["train", "run.yaml", *AWKWARD]
    assert "--node_rank=7" in copy.argv
    assert {k: copy.env[k] for k in given} == given


def test_the_sample_hostfile_is_deepspeed_s_and_ours(root):
    from deepspeed.launcher.runner import fetch_hostfile

    file = root / "launch" / "examples" / "hostfile"
    assert dict(fetch_hostfile(str(file))) == {"node-a": 8, "node-b": 8}
    assert len(slots_of_hostfile(file)) == 16


def test_the_slurm_sample_starts_a_process_per_gpu(root, tmp_path):
    file = root / "launch" / "slurm.sbatch"
    subprocess.run(["bash", "-n", str(file)], check=True, timeout=60)
    # sbatch reads its options until the first command.
    head = file.read_text().partition("set -euo")[0]
    assert {"--nodes=2", "--ntasks-per-node=8", "--gpus-per-node=8"} <= set(re.findall(r"^#SBATCH (\S+)$", head, re.M))
    for name, text in {"srun": RECORD, "scontrol": '#!/bin/sh\n[ "$3" = "n[1-2]" ] && printf "n1\\nn2\\n"\n'}.items():
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    job = {
        "SLURM_SUBMIT_DIR": str(tmp_path),
        "SLURM_JOB_NODELIST": "n[1-2]",
        "SLURM_JOB_ID": "4711",
        "SLURM_CPUS_PER_TASK": "8",
    }
    environment = {"PATH": f"{tmp_path}:{os.environ['PATH']}"} | job
    done = subprocess.run(
        ["bash", str(file), "run.yaml", "x={1, 2}"], env=environment, capture_output=True, text=True, timeout=60, check=True
    )
    started = (tmp_path / "argv").read_text().split("\0")[:-1]
    assert started == [
        "--cpus-per-task=8",
        "--kill-on-bad-exit=1",
        "python",
        "-m",
        "comlrl_ds",
        "train",
        "run.yaml",
        "x={1, 2}",
    ]
    assert done.stdout.startswith("+ MASTER_ADDR=n1 MASTER_PORT=19711 srun ")
    seen = dict(e.split("=", 1) for e in (tmp_path / "env").read_text().split("\0")[:-1])
    # What srun adds in the last task of the second machine.
    task = {"SLURM_PROCID": "15", "SLURM_STEP_NUM_TASKS": "16", "SLURM_NTASKS": "16", "SLURM_LOCALID": "7", "SLURM_NODEID": "1"}
    assert read_launch(seen | task) == Launch(15, 16, 7, "n1", 19711)
