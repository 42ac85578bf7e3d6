"""Processes of an engine connect and exchange messages: real sockets, threads of one process, no JAX runtime."""

import concurrent.futures
import dataclasses
import pickle
import socket
import time

import numpy as np
import pytest

from jpaged.config import EngineConfig
from jpaged.engine.step_plan import RowExtras, RowMask, SamplerVariant, StepPlan
from jpaged.errors import EngineError, ModelLoadError
from jpaged.runtime.parallel.process_group import Channel, ProcessGroup, _connect, _gather, _listening, facts_of
from tests.support.row_inits import make_row

PLAN = StepPlan(
    rows=np.arange(3, dtype=np.int32), num_tokens=np.array([1, 1, 5], np.int32), num_decodes=2,
    samples=np.array([True, True, False]), prompt_tokens=np.arange(5, dtype=np.int32),
    block_updates=np.zeros((1, 4), np.int32), sampler=SamplerVariant.FULL,
    row_inits=(
        make_row(
            2, 0, 9, np.zeros((2, 3), np.int32), temperature=0.5, top_p=0.9, seed=2**63,
            extras=RowExtras(mask=np.ones(4, np.uint32)),
        ),
    ),
    masks=(RowMask(1, np.arange(4, dtype=np.uint32)),),
)  # fmt: skip


def free_port():
    """A port that is free together with the next one."""
    while True:
        with socket.socket() as one, socket.socket() as two:
            one.bind(("127.0.0.1", 0))
            try:
                two.bind(("127.0.0.1", one.getsockname()[1] + 1))
            except OSError:
                continue
            return one.getsockname()[1]


def meet(config, *others, fingerprints=None):
    """The result or the error of each process: node 0's, then those of the others."""
    configs = [config, *others]
    fingerprints = fingerprints or ["same"] * len(configs)

    def run(own, fingerprint):
        deadline = time.monotonic() + own.join_timeout
        facts = facts_of(own, fingerprint)
        try:
            return (_gather if own.node_rank == 0 else _connect)(own, facts, deadline)
        except ModelLoadError as error:
            return str(error)

    with concurrent.futures.ThreadPoolExecutor(len(configs)) as threads:
        return list(threads.map(run, configs, fingerprints))


@pytest.fixture
def config():
    return EngineConfig(model="m", nnodes=3, tensor_parallel_size=3, master_port=free_port(), join_timeout=10)


def ranks(config, count):
    return [dataclasses.replace(config, node_rank=rank) for rank in range(1, count)]


def test_nodes_meet_and_exchange_plans(config):
    channels, *others = meet(config, *ranks(config, 3))
    channels[1].send("dispatch", 7, PLAN)
    command, number, plan = others[1].receive(5)
    assert (command, number, plan.sampler) == ("dispatch", 7, SamplerVariant.FULL)
    for field in ("rows", "num_tokens", "samples", "prompt_tokens", "block_updates"):
        received, sent = getattr(plan, field), getattr(PLAN, field)
        assert received.dtype == sent.dtype
        assert np.array_equal(received, sent)
    assert plan.row_inits[0].seed == 2**63
    assert plan.row_inits[0].extras.mask.tolist() == [1, 1, 1, 1]
    assert plan.masks[0].words.tolist() == [0, 1, 2, 3]
    channels[0].close()
    with pytest.raises((EOFError, OSError)):
        others[0].receive(5)


def test_nodes_wait_for_each_other_before_the_first_step(config):
    channels, *others = meet(config, *ranks(config, 3))
    groups = [ProcessGroup(0, 3, channels), *(ProcessGroup(rank, 3, [each]) for rank, each in enumerate(others, 1))]
    with concurrent.futures.ThreadPoolExecutor(3) as threads:
        early = [threads.submit(group.wait_for_all) for group in groups[:2]]
        assert not concurrent.futures.wait(early, 0.2).done
        groups[2].wait_for_all()
        for each in early:
            each.result(5)


def test_a_node_with_other_options_is_named_on_all_nodes(config):
    second, third = ranks(config, 3)
    found = meet(config, second, dataclasses.replace(third, max_model_len=512, dtype="float32"))
    for error in found:
        assert "dtype is 'auto' on node 0 and 'float32' on node 2" in error
        assert "max_model_len is None on node 0 and 512 on node 2" in error


def test_another_checkpoint_is_named(config):
    one = dataclasses.replace(config, nnodes=2, tensor_parallel_size=2)
    for error in meet(one, *ranks(one, 2), fingerprints=["a", "b"]):
        assert "checkpoint is a on node 0 and b on node 1" in error


def test_a_node_that_is_missing_is_named_in_time(config):
    short = dataclasses.replace(config, join_timeout=0.5)
    began = time.monotonic()
    [error] = meet(short)
    assert time.monotonic() - began < 5
    assert f"node 1 and 2 of 3 did not connect to port {config.master_port + 1} within 0.5 s" in error
    assert "--node-rank 1" in error


def test_the_others_are_told_which_node_is_missing(config):
    for error in meet(dataclasses.replace(config, join_timeout=0.5), ranks(config, 2)[0]):
        assert "node 2 of 3 did not connect" in error


def test_a_leader_that_does_not_answer_is_an_error_in_time(config):
    began = time.monotonic()
    [error] = meet(dataclasses.replace(config, node_rank=1, join_timeout=0.5))
    assert time.monotonic() - began < 5
    assert f"node 0 does not answer at 127.0.0.1:{config.master_port + 1} within 0.5 s" in error


def test_a_port_in_use_is_named(config):
    with socket.create_server(("", config.master_port + 1)):
        [error] = meet(config)
    assert f"node 0 cannot listen on port {config.master_port + 1}" in error
    assert "choose another --master-port" in error


def test_something_else_on_the_port_is_ignored(config):
    one = dataclasses.replace(config, nnodes=2, tensor_parallel_size=2)

    def stranger():
        for _ in range(100):
            try:
                with socket.create_connection(("127.0.0.1", one.master_port + 1)) as raw:
                    raw.sendall(b"GET / HTTP/1.1\r\n\r\n")
                return
            except OSError:
                time.sleep(0.02)

    with concurrent.futures.ThreadPoolExecutor(2) as threads:
        leader = threads.submit(meet, one)
        threads.submit(stranger).result()
        [follower] = meet(*ranks(one, 2))
        [channels] = leader.result()
    channels[0].send("close")
    assert follower.receive(5) == ("close",)


def test_nodes_answer_the_questions_of_node_0(config):
    """Two threads ask, and answers come in another order than the questions."""
    channels, *others = meet(config, *ranks(config, 3))
    groups = [ProcessGroup(0, 3, channels), *(ProcessGroup(rank, 3, [each]) for rank, each in enumerate(others, 1))]
    groups[0].watch()
    with concurrent.futures.ThreadPoolExecutor(2) as threads:
        asked = [threads.submit(lambda what=what: groups[0].ask("do", what).problem()) for what in ("this", "that")]
        for group in groups[1:]:
            for _, number, what in reversed([group.channels[0].receive(5) for _ in asked]):
                group.answer(number, f"not {what}" if group.rank == 2 else "")
        assert [one.result(5) for one in asked] == ["node 2: not this", "node 2: not that"]
        question = groups[0].ask("do", "more")
        assert not question.early_problem()
        groups[1].answer(groups[1].channels[0].receive(5)[1], "wrong")
        while not question.early_problem():
            time.sleep(0.001)
        assert question.early_problem() == "node 1: wrong"
        waiting = threads.submit(question.problem)
        for group in groups[1:]:
            group.closing = True
        groups[0].close()
        with pytest.raises(EngineError, match="the engine is closed"):
            waiting.result(5)


class _Harmful:
    def __reduce__(self):
        return print, ("code was run",)


def test_a_message_cannot_run_code(capsys):
    port = free_port()
    with _listening("127.0.0.1", port) as accept, socket.create_connection(("127.0.0.1", port)) as raw:
        channel = accept(time.monotonic() + 5)
        body = pickle.dumps(_Harmful())
        raw.sendall(len(body).to_bytes(4, "big") + body)
        with pytest.raises(pickle.UnpicklingError, match=r"builtins\.print is not a part of a message"):
            channel.receive(5)
        channel.close()
    assert capsys.readouterr().out == ""
    assert Channel
