"""Nodes, detected from the description of a cluster: LeaderWorkerSet, TPU slices, Slurm."""

import pytest

from jpaged.cli import parse
from jpaged.cli.flags.cluster import Node, detect
from jpaged.errors import RequestError

LWS = {"LWS_GROUP_SIZE": "3", "LWS_WORKER_INDEX": "2", "LWS_LEADER_ADDRESS": "jpaged-0.jpaged.default"}
TPU = {"TPU_WORKER_HOSTNAMES": "t-0.t, t-1.t,t-2.t,t-3.t", "TPU_WORKER_ID": "1"}
SLURM = {
    "SLURM_STEP_NODELIST": "n[03-07],m1", "SLURM_NTASKS": "6", "SLURM_STEP_NUM_NODES": "6", "SLURM_PROCID": "0"
}  # fmt: skip


@pytest.mark.parametrize(
    ("environ", "node"),
    [
        (LWS, Node("LeaderWorkerSet", 3, 2, "jpaged-0.jpaged.default")),
        (TPU, Node("a TPU slice", 4, 1, "t-0.t")),
        (SLURM, Node("Slurm", 6, 0, "n03")),
        (LWS | TPU, Node("LeaderWorkerSet", 3, 2, "jpaged-0.jpaged.default")),  # on TPU pods both are set
        (TPU | SLURM, Node("a TPU slice", 4, 1, "t-0.t")),
    ],
)
def test_clusters(environ, node):
    assert detect(environ | {"PATH": "/bin"}) == node
    assert node.options == {"nnodes": node.nnodes, "node_rank": node.node_rank, "master_addr": node.master_addr}


@pytest.mark.parametrize(
    ("hosts", "first"),
    [
        ("node001", "node001"), ("node001,host2", "node001"), ("node[001-0015],host2", "node001"),
        ("node[001,007-015],host2", "node001"), ("n[9]-ib,m", "n9-ib"), ("10.0.0.1,10.0.0.2", "10.0.0.1"),
    ],
)  # fmt: skip
def test_first_host_of_slurms_list(hosts, first):
    assert detect(SLURM | {"SLURM_STEP_NODELIST": hosts}).master_addr == first


@pytest.mark.parametrize(
    ("environ", "says"),
    [
        ({}, "found no LWS_GROUP_SIZE .* SLURM_STEP_NODELIST .*: use --nnodes, --node-rank and --master-addr"),
        ({"SLURM_JOB_ID": "1"}, "found no LWS_GROUP_SIZE"),  # in a batch script, outside srun
        (SLURM | {"SLURM_NTASKS": "12"}, "starts 12 tasks on 6 nodes.*srun --ntasks-per-node 1"),
        (SLURM | {"SLURM_PROCID": "6"}, "Slurm says process 6 of 6"),
        (SLURM | {"SLURM_STEP_NODELIST": ""}, "the first one at ''"),
        (LWS | {"LWS_WORKER_INDEX": "a"}, "LWS_WORKER_INDEX='a' is not a number"),
        ({"TPU_WORKER_HOSTNAMES": "a,b"}, "TPU_WORKER_ID is not set"),
    ],
)
def test_environments_that_cannot_be_used(environ, says):
    with pytest.raises(RequestError, match=says):
        detect(environ)


@pytest.mark.parametrize("flags", [["--nnodes", "2"], ["--master-addr", "a"], ["--headless"]])
def test_detected_values_are_not_given_as_well(flags, monkeypatch):
    for name, value in LWS.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(RequestError, match="comes from the cluster with --detect-nodes: leave one out"):
        parse(["serve", "demo", "--detect-nodes", *flags]).run()
