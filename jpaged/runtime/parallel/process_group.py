"""Processes of one engine: they connect, check that their options agree, and detect a lost process.

1. Node 0 listens on `master_port` + 1. Every other node connects and sends its `Facts`: versions, options, and a
   fingerprint of the checkpoint. Node 0 accepts, or returns the values that differ.
2. All processes join JAX's distributed runtime at `master_addr`:`master_port`. Then `jax.devices()` lists all devices,
   and one program runs on all of them.
3. Node 0 sends every plan to the other nodes (`group_runner`). If a connection ends before `close`, a process is lost.
   Collectives would wait for it for ever, so the remaining processes end with status 1.
4. Node 0 asks the other nodes about updates of the weights (`Question`).

Messages are pickled. Unpickling accepts only the types of a plan, so a message cannot run code. The numbers of arrays
follow their message as bytes.
"""

import contextlib
import dataclasses
import logging
import multiprocessing.connection
import os
import pickle
import platform
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jaxtyping import UInt8

from jpaged import unpickling
from jpaged.config import EngineConfig
from jpaged.errors import ModelLoadError
from jpaged.runtime.parallel.question import Question, Questions
from jpaged.version import __version__

logger = logging.getLogger(__name__)

Facts = Mapping[str, str]
# Options that may differ between nodes: rank, addresses, timeout, and folders of each machine.
OWN = frozenset({
    "node_rank", "model", "tokenizer", "download_dir", "compilation_cache_dir", "master_addr", "join_timeout",
})  # fmt: skip
_ACCEPTED = {
    ("jpaged.engine.step_plan", "StepPlan"), ("jpaged.engine.step_plan", "RowInit"),
    ("jpaged.engine.step_plan", "RowExtras"), ("jpaged.engine.step_plan", "RowMask"),
    ("jpaged.engine.step_plan", "SamplerVariant"), ("numpy", "dtype"), ("numpy", "ndarray"),
    ("numpy._core.numeric", "_frombuffer"), ("numpy.core.numeric", "_frombuffer"),
    ("numpy._core.multiarray", "_reconstruct"), ("numpy.core.multiarray", "_reconstruct"),
    ("numpy._core.multiarray", "scalar"), ("numpy.core.multiarray", "scalar"),
}  # fmt: skip
REFUSAL = "{} is not a part of a message between nodes"
_RETRY_SECONDS = 0.2
MOST_BYTES = 2**28  # maximum size of a message; a larger one is not from a node
SLAB_BYTES = 2**26  # of an array, in one piece
HELLO_SECONDS = 5   # for a new connection to send its rank and `Facts`
OTHERS_SECONDS = 2  # after a node disagrees: for other nodes to connect, so that they get the differences, too
SHUTDOWN_SECONDS = 10  # to wait for the other processes when the engine closes
# A dead host does not close its connections. Keepalive detects it: 5 s of silence, then 3 probes 2 s apart.
_KEEPALIVE = {"TCP_KEEPIDLE": 5, "TCP_KEEPINTVL": 2, "TCP_KEEPCNT": 3}


class Channel:
    """Messages to another node, in order. A message is a tuple of plain values and the types of a plan."""

    def __init__(self, connection: multiprocessing.connection.Connection):
        self._connection = connection
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(connection.fileno())) as raw:
            raw.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            for name, value in _KEEPALIVE.items():
                if hasattr(socket, name):
                    raw.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)

    def send(self, *message: Any) -> None:
        """Send a message. Raises OSError if the other node is lost."""
        self._connection.send_bytes(pickle.dumps(message, protocol=5))

    def receive(self, seconds: float | None = None) -> tuple[Any, ...]:
        """The next message. Raises EOFError or OSError if the other node is lost, TimeoutError after `seconds`."""
        if seconds is not None and not self._connection.poll(max(0.0, seconds)):
            raise TimeoutError
        return unpickling.load(self._connection.recv_bytes(MOST_BYTES), _ACCEPTED, REFUSAL)

    def send_bytes(self, data: UInt8[np.ndarray, " bytes"]) -> None:
        """Send the bytes of an array. Raises OSError if the other node is lost."""
        for first in range(0, len(data), SLAB_BYTES):
            self._connection.send_bytes(memoryview(data[first : first + SLAB_BYTES]))  # ty: ignore[invalid-argument-type]

    def receive_bytes(self, size: int) -> UInt8[np.ndarray, " bytes"]:
        """The bytes of an array, after its message. Raises EOFError or OSError if the other node is lost."""
        data, done = np.empty(size, np.uint8), 0
        while done < size:
            done += self._connection.recv_bytes_into(data, done)
        return data

    def close(self) -> None:
        """Close the connection."""
        self._connection.close()


@dataclasses.dataclass
class ProcessGroup:
    """This process and its connections: node 0 has one to each other node, by rank; other nodes have one to node 0."""

    rank: int
    size: int
    channels: list[Channel]
    closing: bool = False
    _sending: threading.Lock = dataclasses.field(default_factory=threading.Lock)
    _questions: Questions = dataclasses.field(default_factory=Questions)

    @classmethod
    def join(cls, config: EngineConfig, fingerprint: str) -> "ProcessGroup | None":
        """Connect to the other nodes, before JAX starts its backend. Returns None if the engine has one process.

        fingerprint: of the checkpoint. Raises ModelLoadError after `config.join_timeout` s, or if facts differ.
        """
        if config.nnodes == 1:
            return None
        facts, deadline = facts_of(config, fingerprint), time.monotonic() + config.join_timeout
        if config.node_rank == 0:
            group = cls(0, config.nnodes, _gather(config, facts, deadline))
        else:
            group = cls(config.node_rank, config.nnodes, [_connect(config, facts, deadline)])
        logger.info("node %d of %d: all nodes agree; joining JAX's distributed runtime", group.rank, group.size)
        jax.config.update("jax_enable_preemption_service", False)  # it would catch SIGTERM, on which the server drains
        try:
            jax.distributed.initialize(
                f"{config.master_addr}:{config.master_port}", config.nnodes, config.node_rank,
                initialization_timeout=max(1, int(deadline - time.monotonic())),
                shutdown_timeout_seconds=SHUTDOWN_SECONDS,
            )  # fmt: skip
        except RuntimeError as error:
            raise ModelLoadError(
                f"JAX's distributed runtime at {config.master_addr}:{config.master_port} cannot be joined: {error}: "
                "the port must be free on node 0, and reachable from all nodes"
            ) from error
        return group

    def wait_for_all(self) -> None:
        """Wait until every process has called this. Ends this process if another is lost.

        Processes compile at different speeds, but gloo's first all-reduce waits only 30 s for the other processes.
        """
        other = "node 0"
        try:
            if self.rank > 0:
                [leader] = self.channels
                leader.send("ready")
                leader.receive()
                return
            for rank, channel in enumerate(self.channels, 1):
                other = f"node {rank}"
                channel.receive()
        except (EOFError, OSError):
            self.lost(other)
            return
        self.send("ready")

    def send(self, *message: Any) -> None:
        """Send a message to every other node that this node is connected to. Any thread may call this."""
        with self._sending:
            for index, channel in enumerate(self.channels):
                with self._noticing_loss(index):
                    channel.send(*message)

    def send_arrays(self, messages: Sequence[tuple[tuple[Any, ...], np.ndarray]]) -> None:
        """Node 0: send each other node its own message, and the bytes of an array after it. messages: by node."""
        with self._sending:
            for index, (channel, (message, array)) in enumerate(zip(self.channels, messages, strict=True)):
                with self._noticing_loss(index):
                    channel.send(*message)
                    channel.send_bytes(np.ascontiguousarray(array).reshape(-1).view(np.uint8))

    @contextlib.contextmanager
    def _noticing_loss(self, index: int) -> Iterator[None]:
        """End this process if the node of a channel is lost."""
        try:
            yield
        except OSError:
            self.lost("node 0" if self.rank > 0 else f"node {index + 1}")

    def ask(self, command: str, *values: Any) -> Question:
        """Node 0: send a command that every other node answers. Needs `watch`. Any thread may call this."""
        question = self._questions.new(self.size - 1)
        self.send(command, question.number, *values)
        return question

    def answer(self, number: int, problem: str) -> None:
        """Other nodes: answer node 0. number: of the question. problem: "" if there is none."""
        self.send("answer", number, problem)

    def watch(self) -> None:
        """Node 0: end this process when another is lost. From now on the other nodes send only answers and failures."""
        for rank, channel in enumerate(self.channels, 1):
            threading.Thread(target=self._watch, args=(rank, channel), name=f"jpaged-node-{rank}", daemon=True).start()

    def _watch(self, rank: int, channel: Channel) -> None:
        why = ""
        try:
            while True:
                kind, *values = channel.receive()
                if kind == "answer":
                    self._questions.note(rank, *values)
                else:
                    why = str(values[0])
        except (EOFError, OSError, pickle.UnpicklingError):
            self.lost(f"node {rank}", why)

    def lost(self, who: str, why: str = "") -> None:
        """End this process with status 1, because another has ended. Does nothing if the group is closing.

        Uses `os._exit`: a step may wait for the lost process in a collective, which nothing can interrupt.
        """
        if self.closing:
            return
        reason = f": {why}" if why else ""
        message = f"jpaged: {who} of {self.size} is lost{reason}. Node {self.rank} ends; start all nodes again"
        print(message, file=sys.stderr, flush=True)
        logging.shutdown()
        os._exit(1)

    def abandon(self) -> None:
        """Close the connections, so that the other nodes end too. For failures before the engine exists."""
        self.closing = True
        for channel in self.channels:
            channel.close()

    def close(self) -> None:
        """Tell all nodes that the engine ends, and leave JAX's distributed runtime."""
        if self.closing:
            return
        self.closing = True
        self._questions.close()
        for channel in self.channels:
            with contextlib.suppress(OSError):
                if self.rank == 0:
                    channel.send("close")
        with contextlib.suppress(RuntimeError):
            jax.distributed.shutdown()
        for channel in self.channels:
            channel.close()


def facts_of(config: EngineConfig, fingerprint: str) -> dict[str, str]:
    """Values that must be equal in all processes of an engine, as text."""
    facts = {"jpaged": __version__, "jax": jax.__version__, "Python": ".".join(platform.python_version_tuple()[:2])}
    facts["checkpoint"] = fingerprint
    for field in dataclasses.fields(config):
        if field.name not in OWN:
            facts[field.name] = repr(getattr(config, field.name))
    return facts


def differences(mine: Facts, theirs: Facts, their_rank: int) -> list[str]:
    """A sentence for each value that differs. Mine are from node 0."""
    return [
        f"{name} is {mine.get(name, 'unknown')} on node 0 and {theirs.get(name, 'unknown')} on node {their_rank}"
        for name in sorted(mine.keys() | theirs.keys())
        if mine.get(name) != theirs.get(name)
    ]


def _gather(config: EngineConfig, facts: Facts, deadline: float) -> list[Channel]:
    """Node 0: wait for the other nodes, then send each the differences, or "" if all agree."""
    port, found, wrong = config.master_port + 1, {}, []
    with _listening(config.master_addr, port) as accept:
        while len(found) < config.nnodes - 1:
            channel = accept(deadline)
            if channel is None:
                break
            try:
                rank, theirs = channel.receive(min(HELLO_SECONDS, deadline - time.monotonic()))
            except (EOFError, OSError, TimeoutError, ValueError, pickle.UnpicklingError):
                channel.close()  # not a node
                continue
            news = differences(facts, theirs, rank)
            if rank in found or not 0 < rank < config.nnodes:
                news.append(f"node_rank={rank} is taken, or not from 1 to {config.nnodes - 1}")
                with contextlib.suppress(OSError):
                    channel.send(_disagree(news))
            else:
                found[rank] = channel
            if news and not wrong:
                deadline = min(deadline, time.monotonic() + OTHERS_SECONDS)
            wrong += news
    problem = _disagree(wrong) if wrong else ""
    if not wrong and (missing := [str(rank) for rank in range(1, config.nnodes) if rank not in found]):
        problem = (
            f"node {' and '.join(missing)} of {config.nnodes} did not connect to port {port} within "
            f"{config.join_timeout:g} s: start it with --nnodes {config.nnodes} --node-rank {missing[0]} "
            f"--master-addr {config.master_addr} --master-port {config.master_port} --headless"
        )
    for channel in found.values():
        with contextlib.suppress(OSError):
            channel.send(problem)
    if problem:
        raise ModelLoadError(problem)
    return [found[rank] for rank in sorted(found)]


def _connect(config: EngineConfig, facts: Facts, deadline: float) -> Channel:
    """Other nodes: connect to node 0, and wait until it has accepted all nodes."""
    address = (config.master_addr, config.master_port + 1)
    while True:
        try:
            raw = socket.create_connection(address, timeout=max(0.1, deadline - time.monotonic()))
            raw.setblocking(True)
            channel = Channel(multiprocessing.connection.Connection(raw.detach()))
            break
        except OSError as error:
            if time.monotonic() > deadline:
                raise ModelLoadError(
                    f"node 0 does not answer at {address[0]}:{address[1]} within {config.join_timeout:g} s "
                    f"({error.strerror or error}): --master-addr is the address of node 0, and its ports "
                    f"{config.master_port} and {address[1]} must be reachable"
                ) from None
            time.sleep(_RETRY_SECONDS)
    try:
        channel.send(config.node_rank, dict(facts))
        [problem] = channel.receive(deadline - time.monotonic())
    except (EOFError, OSError) as error:
        reason = "is silent" if isinstance(error, TimeoutError) else "has ended"
        raise ModelLoadError(f"node 0 at {address[0]}:{address[1]} {reason}: look at its log") from None
    if problem:
        raise ModelLoadError(problem)
    return channel


def _disagree(wrong: list[str]) -> str:
    return f"the nodes do not agree: {'; '.join(wrong)}. Start all nodes with the same versions, options and checkpoint"


@contextlib.contextmanager
def _listening(host: str, port: int) -> Iterator[Callable[[float], Channel | None]]:
    """Listen on all addresses. Yields a function: next connection, or None after a deadline (`time.monotonic`)."""
    try:
        listener = socket.create_server(("", port))
    except OSError as error:
        raise ModelLoadError(
            f"node 0 cannot listen on port {port} ({error.strerror or error}): choose another --master-port; the port "
            "after it is used as well"
        ) from None

    def accept(deadline: float) -> Channel | None:
        listener.settimeout(max(0.01, deadline - time.monotonic()))
        try:
            raw, _ = listener.accept()
        except TimeoutError:
            return None
        raw.setblocking(True)
        return Channel(multiprocessing.connection.Connection(raw.detach()))

    with listener:
        yield accept
