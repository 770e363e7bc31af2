"""What the launcher says of this process, and what the machine says of itself."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from comlrl_ds.config.errors import ConfigError, Problem

# Names of (rank, size, local rank) by launcher; the first complete set counts. mpirun and srun set no RANK.
_NAMES = (
    ("RANK", "WORLD_SIZE", "LOCAL_RANK"),
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK"),
    ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID"),
)


@dataclass(frozen=True)
class Launch:
    """This process among those that were started together. Global rank 0 is the main one."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    master_addr: str = "127.0.0.1"
    master_port: int = 29500

    @property
    def is_main(self) -> bool:
        return self.rank == 0


def read_launch(environment: Mapping[str, str]) -> Launch:
    """The launch that environment variables describe: torch's names, or Open MPI's or SLURM's beside MASTER_ADDR.

    Raises:
        ConfigError: a value that is no number, or a rank outside the launch.
    """
    names = next((n for n in _NAMES if n[1] in environment and n[0] in environment), None)
    if names is None or (names[0] != "RANK" and "MASTER_ADDR" not in environment):
        if environment.get("WORLD_SIZE", "1") != "1":
            raise ConfigError(
                Problem("WORLD_SIZE", f"is {environment['WORLD_SIZE']}, but RANK is not set; start with deepspeed")
            )
        return Launch(local_rank=_number(environment, "LOCAL_RANK", 0))
    rank, size = _number(environment, names[0], 0), _number(environment, names[1], 1)
    local = _number(environment, names[2], 0)
    if not 0 <= rank < size:
        raise ConfigError(Problem(names[0], f"{rank} is no rank of a launch of {size}"))
    if size > 1 and "MASTER_ADDR" not in environment:
        raise ConfigError(Problem("MASTER_ADDR", f"not set for {size} ranks; start with deepspeed, or set it to rank 0's host"))
    address = environment.get("MASTER_ADDR", "127.0.0.1")
    return Launch(rank, size, local, address, _number(environment, "MASTER_PORT", 29500))


def _number(environment: Mapping[str, str], name: str, default: int) -> int:
    value = environment.get(name, str(default))
    if not value.isdigit():
        raise ConfigError(Problem(name, f"{value!r} is not a number"))
    return int(value)


@dataclass(frozen=True)
class Host:
    """A machine as one of its processes sees it.

    Attributes:
        name: its hostname. aliases: its addresses, by which a hostfile may call it.
        identity: equal for processes that can open each other's /proc entries and abstract sockets.
        address: where processes of other machines reach this one. interface: the network device of that address.
    """

    name: str
    aliases: tuple[str, ...]
    identity: str
    address: str
    interface: str

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def this_host(master_addr: str, master_port: int) -> Host:
    """This machine, seen from the way to the main rank."""
    import psutil

    name = socket.gethostname()
    address = own_address(master_addr, master_port)
    found = psutil.net_if_addrs()
    ips = [a.address for listed in found.values() for a in listed if a.family == socket.AF_INET]
    interface = next((n for n, listed in found.items() if any(a.address == address for a in listed)), "lo")
    aliases = (name.split(".")[0], *(ip for ip in ips if not ip.startswith("127.")))
    return Host(name, aliases, this_identity(), address, interface)


def own_address(towards: str, port: int = 9) -> str:
    """The address that packets to another machine leave by. Resolving the own name instead gives loopback on many machines."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((towards, port))  # of a datagram socket: nothing is sent
        return probe.getsockname()[0]


def this_identity() -> str:
    """Equal for processes that can open each other's /proc entries and abstract sockets."""
    parts = [socket.gethostname()]
    boot = Path("/proc/sys/kernel/random/boot_id")
    if boot.exists():
        parts.append(boot.read_text().strip())
    for space in ("pid", "net"):
        link = f"/proc/self/ns/{space}"
        if os.path.exists(link):
            parts.append(os.readlink(link))
    return "|".join(parts)
