"""`jpaged serve --detect-nodes`: reads the nodes' number, rank and first host from the cluster's environment variables.

It reads the variables of `jax.distributed.initialize`, and LeaderWorkerSet's.
"""

import dataclasses
import re
from collections.abc import Mapping
from typing import Any

from jpaged.errors import RequestError


@dataclasses.dataclass(frozen=True)
class Node:
    """One process of an engine, as the cluster describes it."""

    cluster: str
    nnodes: int
    node_rank: int
    master_addr: str

    @property
    def options(self) -> dict[str, Any]:
        """Engine options."""
        return {"nnodes": self.nnodes, "node_rank": self.node_rank, "master_addr": self.master_addr}


def detect(environ: Mapping[str, str]) -> Node:
    """Find this process's node. Raises RequestError outside a known cluster, or unless each node has one process."""
    if "LWS_GROUP_SIZE" in environ:  # before TPU, because the LeaderWorkerSet controller sets the TPU variables too
        size, rank = _number(environ, "LWS_GROUP_SIZE"), _number(environ, "LWS_WORKER_INDEX")
        return _checked("LeaderWorkerSet", size, rank, _text(environ, "LWS_LEADER_ADDRESS"))
    if "TPU_WORKER_HOSTNAMES" in environ:
        hosts = [host.strip() for host in environ["TPU_WORKER_HOSTNAMES"].split(",")]
        return _checked("a TPU slice", len(hosts), _number(environ, "TPU_WORKER_ID"), hosts[0])
    if "SLURM_STEP_NODELIST" in environ:
        size, nodes = _number(environ, "SLURM_NTASKS"), _number(environ, "SLURM_STEP_NUM_NODES")
        if size != nodes:
            known = f"Slurm starts {size} tasks on {nodes} nodes, and each node needs one: srun --ntasks-per-node 1"
            raise RequestError("detect_nodes", True, known)
        return _checked("Slurm", size, _number(environ, "SLURM_PROCID"), _first_host(environ["SLURM_STEP_NODELIST"]))
    known = "found no LWS_GROUP_SIZE (LeaderWorkerSet), TPU_WORKER_HOSTNAMES (TPU) or SLURM_STEP_NODELIST (srun)"
    raise _refused(known)


def _refused(why: str) -> RequestError:
    return RequestError("detect_nodes", True, f"{why}: use --nnodes, --node-rank and --master-addr")


def _checked(cluster: str, size: int, rank: int, address: str) -> Node:
    if not 0 <= rank < size or not address:
        raise _refused(f"{cluster} says process {rank} of {size}, the first one at {address!r}")
    return Node(cluster, size, rank, address)


def _text(environ: Mapping[str, str], name: str) -> str:
    if name not in environ:
        raise _refused(f"{name} is not set")
    return environ[name]


def _number(environ: Mapping[str, str], name: str) -> int:
    value = _text(environ, name)
    if not value.isdecimal():
        raise _refused(f"{name}={value!r} is not a number")
    return int(value)


def _first_host(hosts: str) -> str:
    """First host of Slurm's list: "a1", "a1,b2", "a[1-4,7],b2" or "a[01-04]-ib"."""
    found = re.match(r"([^\[,]+)(?:\[(\d+)[^\]]*\]([^,]*))?", hosts)
    return "".join(part or "" for part in found.groups()) if found else ""
