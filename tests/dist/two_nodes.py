"""Two machines on one, for launch/multinode.sh: each has its own network, hostname, processes, /dev/shm and sshd.

They are Linux namespaces, which end with the process that made them, even when the tests are killed: nothing is left on the
real machine. A wire connects the two, and nothing else; files are shared, as on a cluster's storage.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

SSH_PORT = 2222
TOOLS = {"/usr/sbin/sshd": "openssh-server", "ssh": "openssh-client", "pdsh": "pdsh", "ip": "iproute2", "unshare": "util-linux"}
NEW = ["unshare", "--net", "--uts", "--mount", "--pid", "--fork", "--mount-proc"]
# The machine's first process waits for the wire, then for the tests' end, which closes its input. Meanwhile it collects
# orphans, as an init must: DeepSpeed's launcher waits 30 s for one that is dead but not collected.
BOOT = """
hostname "$1" && mount -t tmpfs none /dev/shm && mount -t tmpfs none /run && mkdir /run/sshd || exit 1
echo made && read -r wire && /usr/sbin/sshd -f "$2/sshd_config" -E "$2/sshd.log" || exit 1
exec 3<&0
cat <&3 >/dev/null &
echo up
wait $!
"""
SSHD = """Port {port}
ListenAddress {address}
HostKey {keys}/host
AuthorizedKeysFile {keys}/key.pub
PermitRootLogin prohibit-password
PasswordAuthentication no
StrictModes no
UsePAM no
PidFile none
"""
SSH = """Host *
 IdentityFile {keys}/key
 IdentitiesOnly yes
 UserKnownHostsFile /dev/null
 StrictHostKeyChecking no
 LogLevel ERROR
"""


def why_not(root: Path) -> str | None:
    """What two machines lack here; None where they are possible."""
    if os.geteuid() != 0:
        return "two machines need root, for namespaces"
    if missing := [package for tool, package in TOOLS.items() if not shutil.which(tool)]:
        return f"two machines need the packages {', '.join(missing)}"
    if not (root / ".venv" / "bin" / "deepspeed").exists():
        return "launch/setup.sh has not made .venv here"
    probe = "hostname x && mount -t tmpfs none /dev/shm && ip link add name end0 type veth peer name end1"
    tried = subprocess.run([*NEW, "sh", "-c", probe], capture_output=True, text=True, timeout=60, check=False)
    if tried.returncode:
        return f"namespaces are not permitted here: {' '.join(tried.stderr.split())}"
    return None


class Node:
    """One machine. Args: name, its hostname. address: on the wire. folder: for its sshd."""

    def __init__(self, name: str, address: str, folder: Path) -> None:
        self.name, self.address = name, address
        boot = [*NEW, "sh", "-c", BOOT, "boot", name, str(folder)]
        self._process = subprocess.Popen(boot, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self._hear("made")
        self._system: set[int] = set()
        self._space = os.readlink(f"/proc/{self._process.pid}/ns/pid_for_children")

    def _hear(self, word: str) -> None:
        assert self._process.stdout
        if (heard := self._process.stdout.readline().strip()) != word:
            raise RuntimeError(f"{self.name} said {heard!r} instead of {word!r}")

    def within(self, command: list[str], cwd: Path | str = "/") -> list[str]:
        """A command, to be run on this machine."""
        spaces = {"net": "net", "uts": "uts", "mount": "mnt", "pid": "pid_for_children"}
        enter = [f"--{option}=/proc/{self._process.pid}/ns/{file}" for option, file in spaces.items()]
        return ["nsenter", *enter, "sh", "-c", 'cd "$0" && exec "$@"', str(cwd), *command]

    def wire(self, other: Node) -> None:
        """Connects this machine with another, and starts the services of both."""
        ends = ["type", "veth", "peer", "name", "wire", "netns", str(other._process.pid)]
        self._ip("link", "add", "name", "wire", *ends)
        for node in (self, other):
            node._ip("address", "add", f"{node.address}/24", "dev", "wire")
            node._ip("link", "set", "wire", "up")
            node._ip("link", "set", "lo", "up")
            assert node._process.stdin
            node._process.stdin.write("connected\n")
            node._process.stdin.flush()
            node._hear("up")
            node._system = node.processes()

    def _ip(self, *words: str) -> None:
        subprocess.run(["nsenter", f"--net=/proc/{self._process.pid}/ns/net", "ip", *words], check=True, timeout=60)

    def received(self) -> int:
        """Bytes that came over the wire so far."""
        lines = Path(f"/proc/{self._process.pid}/net/dev").read_text().splitlines()
        return next(int(line.split()[1]) for line in lines if line.split()[0] == "wire:")

    def processes(self) -> set[int]:
        """Ids of its live processes, as the real machine numbers them, without its sshd and such."""
        found = set()
        for entry in Path("/proc").iterdir():
            with suppress(OSError):  # it may end while we look
                if entry.name.isdigit() and os.readlink(entry / "ns" / "pid") == self._space:
                    state = (entry / "stat").read_text().rpartition(")")[2].split()[0]
                    found |= {int(entry.name)} - self._system if state != "Z" else set()
        return found

    def process_of_rank(self, rank: int) -> int:
        """Id of a rank's process on this machine."""
        found = []
        for pid in self.processes():
            with suppress(OSError):
                words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
                here = f"RANK={rank}".encode() in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
                if here and b"comlrl_ds" in words and words[words.index(b"comlrl_ds") - 1] == b"-m":
                    found.append(pid)
        (pid,) = found
        return pid

    def end(self) -> None:
        """Its first process ends, and with it all others and its namespaces."""
        assert self._process.stdin and self._process.stdout
        with suppress(OSError):
            self._process.stdin.close()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            for pid in self.processes() | self._system:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()


class Pair:
    """The two machines, and the launcher on the first."""

    def __init__(self, folder: Path, root: Path) -> None:
        self._folder, self._root, self.hostfile = folder, root, folder / "hosts"
        self.nodes: list[Node] = []

    def start(self) -> None:
        folder = self._folder
        (folder / "bin").mkdir(parents=True)
        for key in ("key", "host"):
            subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", folder / key], check=True, timeout=60)
        (folder / "ssh_config").write_text(SSH.format(keys=folder))
        # DeepSpeed and pdsh both take the first ssh of PATH; the user's own configuration stays out of it.
        (folder / "bin" / "ssh").write_text(f'#!/bin/sh\nexec {shutil.which("ssh")} -F {folder}/ssh_config "$@"\n')
        (folder / "bin" / "ssh").chmod(0o755)
        for k, letter in enumerate("ab", 1):
            own = folder / letter
            own.mkdir()
            address = f"10.77.0.{k}"
            (own / "sshd_config").write_text(SSHD.format(port=SSH_PORT, address=address, keys=folder))
            self.nodes.append(Node(f"node-{letter}-{os.getpid()}", address, own))
        self.nodes[0].wire(self.nodes[1])
        self.hostfile.write_text(f"# two machines\n{self.nodes[0].address} slots=2\n{self.nodes[1].address} slots=1\n")

    def launch(self, *words: str, cwd: Path, python_path: str) -> subprocess.Popen[str]:
        """launch/multinode.sh on the first machine, in a process group of its own; `words` are the run file and settings."""
        environment = dict(os.environ) | {
            "PATH": f"{self._folder / 'bin'}{os.pathsep}{os.environ['PATH']}",
            "PYTHONPATH": python_path,
            "MASTER_ADDR": self.nodes[0].address,
            "MASTER_PORT": "29500",  # nobody else is on that machine
            "SSH_PORT": str(SSH_PORT),
            "OMP_NUM_THREADS": "1",
        }
        command = [str(self._root / "launch" / "multinode.sh"), str(self.hostfile), *words]
        return subprocess.Popen(
            self.nodes[0].within(command, cwd), env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT, text=True, start_new_session=True,
        )  # fmt: skip

    def left(self) -> list[str]:
        """Command lines of processes that still run on either machine."""
        lines = []
        for node in self.nodes:
            for pid in node.processes():
                with suppress(OSError):
                    words = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").split("\0")
                    lines.append(f"{node.name}: {' '.join(words)[:200]}")
        return lines

    def end(self) -> None:
        for node in self.nodes:
            node.end()


@contextmanager
def two_nodes(folder: Path, root: Path) -> Iterator[Pair]:
    """The pair, for as long as the block lasts."""
    pair = Pair(folder, root)
    try:
        pair.start()
        yield pair
    finally:
        pair.end()


def finish(process: subprocess.Popen[str], timeout: float) -> tuple[int, str]:
    """(exit code, output) of a launch. On SIGTERM DeepSpeed would end launchers by name, so a late one gets SIGKILL."""
    try:
        output, _ = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        output, _ = process.communicate()
        raise AssertionError(f"the launch took longer than {timeout:.0f} s:\n{output[-6000:]}") from None
    return process.returncode, output


def wait_for(condition: Callable[[], bool], process: subprocess.Popen[str], timeout: float) -> None:
    """Until a condition holds, while a launch runs."""
    end = time.monotonic() + timeout
    while not condition():
        if process.poll() is not None or time.monotonic() > end:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            raise AssertionError(f"the launch did not get there:\n{process.communicate()[0][-6000:]}")
        time.sleep(0.1)


def one_process(file: Path, *words: str, cwd: Path, python_path: str, timeout: float) -> None:
    """The same run file in one process, without launcher."""
    environment = dict(os.environ) | {"PYTHONPATH": python_path, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-W", "ignore", "-m", "comlrl_ds", "train", str(file), *words]
    done = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=timeout, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
