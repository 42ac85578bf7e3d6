"""XLA's foreign function interface: sizes and offsets of its C structs, and their comparison with jaxlib's header.

`library` calls `check` before it compiles a kernel. When XLA registers a kernel, the kernel checks the sizes again and
reports its interface version: see `frame.asks_for_metadata`.
"""

import pathlib
import re
from collections.abc import Iterator

import jax

HEADER = pathlib.Path(jax.ffi.include_dir(), "xla/ffi/api/c_api.h")

# Interface version of the kernels, from jaxlib 0.10.2. XLA accepts kernels of earlier minor versions.
MAJOR_VERSION, MINOR_VERSION = 0, 3
METADATA_EXTENSION = 1  # of XLA_FFI_Extension_Type
RESOURCE_EXHAUSTED = 8  # of XLA_FFI_Error_Code

# Offsets in bytes, and sizes of the structs that kernels make: size, extension, and the fields below.
FRAME_EXTENSION, FRAME_API, FRAME_CONTEXT, FRAME_ARGS, FRAME_RETS = 8, 16, 24, 72, 112
BUFFER_DATA, BUFFER_DIMS = 24, 40
EXTENSION_TYPE, EXTENSION_METADATA = 8, 24
METADATA_VERSION, VERSION_NUMBERS = 8, 16
API_ERROR_CREATE, API_SCHEDULE, API_NUM_THREADS = 48, 136, 144
ERROR_MESSAGE, ERROR_CODE, ERROR_CREATE_SIZE = 16, 24, 28
POOL_CONTEXT = 16  # of both structs for the thread pool
SCHEDULE_TASK, SCHEDULE_DATA, SCHEDULE_SIZE = 24, 32, 40
THREADS_NUMBER, NUM_THREADS_SIZE = 24, 32
# Sizes of the structs up to the last field that a kernel reads. XLA's may be larger.
LEAST_FRAME, LEAST_API, LEAST_METADATA = FRAME_RETS + 8, API_NUM_THREADS + 8, METADATA_VERSION + VERSION_NUMBERS + 8

# Paths of fields from a struct, and their offsets. The header's name of a struct follows "XLA_FFI_".
FIELDS = {
    "CallFrame.extension_start": FRAME_EXTENSION, "CallFrame.api": FRAME_API, "CallFrame.ctx": FRAME_CONTEXT,
    "CallFrame.args.args": FRAME_ARGS, "CallFrame.rets.rets": FRAME_RETS,
    "Buffer.data": BUFFER_DATA, "Buffer.dims": BUFFER_DIMS,
    "Metadata_Extension.extension_base.type": EXTENSION_TYPE, "Metadata_Extension.metadata": EXTENSION_METADATA,
    "Metadata.api_version": METADATA_VERSION, "Api_Version.major_version": VERSION_NUMBERS,
    "Api_Version.minor_version": VERSION_NUMBERS + 4,
    "Api.XLA_FFI_Error_Create": API_ERROR_CREATE, "Api.XLA_FFI_ThreadPool_Schedule": API_SCHEDULE,
    "Api.XLA_FFI_ThreadPool_NumThreads": API_NUM_THREADS,
    "Error_Create_Args.message": ERROR_MESSAGE, "Error_Create_Args.errc": ERROR_CODE,
    "ThreadPool_Schedule_Args.ctx": POOL_CONTEXT, "ThreadPool_Schedule_Args.task": SCHEDULE_TASK,
    "ThreadPool_Schedule_Args.data": SCHEDULE_DATA,
    "ThreadPool_NumThreads_Args.ctx": POOL_CONTEXT, "ThreadPool_NumThreads_Args.num_threads": THREADS_NUMBER,
}  # fmt: skip
NUMBERS = {  # by the words before them in the header
    "XLA_FFI_Extension_Metadata =": METADATA_EXTENSION,
    "XLA_FFI_Error_Code_RESOURCE_EXHAUSTED =": RESOURCE_EXHAUSTED,
    "define XLA_FFI_API_MAJOR": MAJOR_VERSION,
}
_SIZES = {"size_t": 8, "int64_t": 8, "int32_t": 4, "int": 4}  # enums have 4 bytes, pointers 8


def check() -> None:
    """Compare jaxlib's header, if it exists, with this module. Raises RuntimeError if they differ."""
    if HEADER.is_file() and (wrong := list(differences(HEADER.read_text(encoding="utf-8")))):
        raise RuntimeError(f"{HEADER} differs from the interface of the native kernels: {'; '.join(wrong)}")


def differences(header: str) -> Iterator[str]:
    """Yield each field and number that differs from this module. header: the text of c_api.h."""
    for path, expected in FIELDS.items():
        struct, *names = path.split(".")
        kind, offset = f"XLA_FFI_{struct}", 0
        for name in names:
            field = _layout(header, kind)[0].get(name)
            if field is None:
                yield f"{path} is missing"
                break
            offset, kind = offset + field[0], field[1]
        else:
            if offset != expected:
                yield f"{path} is at {offset}, not at {expected}"
    for name, number in NUMBERS.items():
        found = re.search(rf"{name} (\d+)", header)
        if found is None or int(found[1]) != number:
            yield f"{name} {found and found[1]}, not {number}"


def _layout(header: str, struct: str) -> tuple[dict[str, tuple[int, str]], int]:
    """Offset and type of each field of a struct, and its size in bytes. Nothing for a struct that the header lacks."""
    found = re.search(rf"struct {struct} {{(.*?)\n}}", header, re.DOTALL)
    body = re.sub(r"//[^\n]*", "", found[1]) if found else ""
    body = re.sub(r"_XLA_FFI_API_STRUCT_FIELD\((\w+)\)", r"void* \1", body)
    fields: dict[str, tuple[int, str]] = {}
    offset = 0
    for line in filter(None, map(str.strip, body.split(";"))):
        match = re.match(r"(?:const )?(?:struct )?(.*?)(\w+)(?:\[\d+\])?$", line, re.DOTALL)
        kind, name = (match[1].strip(), match[2]) if match else ("void*", line)
        if kind.endswith("*"):
            size = align = 8
        elif kind in _SIZES or not re.search(rf"struct {kind} {{", header):  # a number or an enum
            size = align = _SIZES.get(kind, 4)
        else:
            size, align = _layout(header, kind)[1], 8
        offset = -(-offset // align) * align
        fields[name] = (offset, kind)
        offset += size
    return fields, -(-offset // 8) * 8
