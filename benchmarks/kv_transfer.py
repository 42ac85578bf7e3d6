"""Arrays from one process to another: through host memory and a socket, and with JAX's transfer server.

    python benchmarks/kv_transfer.py [--mib 1 16 64] [--rounds 15] [--output FILE]

`LLM.take_kv` and `put_kv` hand KV over as bytes, and their caller sends them. `jax.experimental.transfer` sends from
device to device. A child process has the arrays. The two ways take turns, and each round ends when the array is on the
device of this process and its last number was read. Prints the median and the smallest time of each, and the ratio.
Bytes are checked with CRC-32, as `take_kv` does; the transfer server checks nothing.
"""

import argparse
import json
import multiprocessing
import pathlib
import statistics
import sys
import time
import zlib
from multiprocessing.connection import Connection
from typing import Any

import jax
import numpy as np
from jax.experimental import transfer
from tqdm import tqdm


def serve(connection: Connection, sizes: list[int]) -> None:
    """The process that has the arrays: answers requests until `connection` ends. sizes: in MiB."""
    server = _server()
    arrays = {size: jax.block_until_ready(jax.numpy.arange(size * 2**18, dtype=np.float32)) for size in sizes}
    connection.send(server.address())
    while True:
        try:
            way, size, number = connection.recv()
        except EOFError:
            return
        if way == "transfer server":
            server.await_pull(number, [arrays[size]])
            connection.send_bytes(b"ready")
        else:
            data = np.asarray(arrays[size]).tobytes()
            connection.send_bytes(data)
            connection.send(zlib.crc32(data))


def _server() -> transfer.TransferServer:
    return transfer.start_transfer_server(jax.devices()[0].client, "127.0.0.1:0", ["127.0.0.1:0"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mib", type=int, nargs="+", default=[1, 16, 64])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--output", type=pathlib.Path, help="JSON file of the rows")
    args = parser.parse_args()
    context = multiprocessing.get_context("spawn")
    connection, other = context.Pipe()
    child = context.Process(target=serve, args=(other, args.mib), daemon=True)
    child.start()
    other.close()
    link = _server().connect(connection.recv())
    device, number, rows = jax.devices()[0], 0, []
    sharding = jax.sharding.SingleDeviceSharding(device)
    bar = tqdm(total=len(args.mib) * args.rounds, desc="rounds", file=sys.stderr)
    for size in args.mib:
        shape = jax.ShapeDtypeStruct((size * 2**18,), np.float32, sharding=sharding)
        seconds: dict[str, list[float]] = {"bytes": [], "transfer server": []}
        for _ in range(args.rounds):
            for way, found in seconds.items():
                number += 1
                began = time.perf_counter()
                connection.send((way, size, number))
                if way == "bytes":
                    data = connection.recv_bytes()
                    assert zlib.crc32(data) == connection.recv()
                    array = jax.device_put(np.frombuffer(data, np.float32), device)
                else:
                    connection.recv_bytes()
                    (array,) = link.pull(number, [shape])
                assert float(array[-1]) == size * 2**18 - 1
                found.append(time.perf_counter() - began)
            bar.update()
        row: dict[str, Any] = {"mib": size, "jax": jax.__version__, "device": device.device_kind}
        for way, found in seconds.items():
            name = way.replace(" ", "_")
            row[f"{name}_ms"] = round(1e3 * statistics.median(found), 2)
            row[f"{name}_least_ms"] = round(1e3 * min(found), 2)
        row["ratio"] = round(row["transfer_server_ms"] / row["bytes_ms"], 2)
        rows.append(row)
        print(row)
    bar.close()
    if args.output:
        args.output.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
