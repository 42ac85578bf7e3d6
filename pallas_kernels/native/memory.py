"""Memory by address, for numba code that must not use Python objects. Addresses are int64, and offsets are in bytes."""

from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from pallas_kernels.native.c_api import ERROR_CREATE_SIZE
from pallas_kernels.native.library import THREAD_LIMIT

I8, I32, I64 = ir.IntType(8), ir.IntType(32), ir.IntType(64)


def pointer(builder: Any, address: Any, kind: Any) -> Any:
    """LLVM value: `address` as a pointer to `kind`."""
    return builder.inttoptr(address, kind.as_pointer())


def declared(module: Any, name: str, kind: Any) -> Any:
    """The function `name` of an LLVM module, declared once. kind: its LLVM type."""
    return module.globals.get(name) or ir.Function(module, kind, name)


def _load(kind: Any, result: Any) -> Any:
    @intrinsic
    def load(typing_context: Any, address: Any) -> Any:
        def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            return builder.load(pointer(builder, arguments[0], kind))

        return result(types.int64), codegen

    return load


def _store(kind: Any, value: Any) -> Any:
    @intrinsic
    def store(typing_context: Any, address: Any, number: Any) -> Any:
        def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            builder.store(arguments[1], pointer(builder, arguments[0], kind))
            return context.get_dummy_value()

        return types.void(types.int64, value), codegen

    return store


load_int64, store_int64 = _load(I64, types.int64), _store(I64, types.int64)
load_int32, store_int32 = _load(I32, types.int32), _store(I32, types.int32)
load_float32, store_float32 = _load(ir.FloatType(), types.float32), _store(ir.FloatType(), types.float32)


@intrinsic
def fetch_add(typing_context: Any, address: Any, amount: Any) -> Any:
    """Add to an int64 atomically, and return its former value. Adding 0 is an atomic read."""

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.atomic_rmw("add", pointer(builder, arguments[0], I64), arguments[1], "seq_cst")

    return types.int64(types.int64, types.int64), codegen


@intrinsic
def call(typing_context: Any, function: Any, argument: Any) -> Any:
    """Call the C function at an address. It takes a pointer and returns one."""

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.call(pointer(builder, arguments[0], ir.FunctionType(I64, [I64])), [arguments[1]])

    return types.int64(types.int64, types.int64), codegen


def _c_function(name: str, result: Any, returns: Any) -> Any:
    @intrinsic
    def function(typing_context: Any, argument: Any) -> Any:
        def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            kind = ir.FunctionType(result, [I64])
            value = builder.call(declared(builder.module, name, kind), [arguments[0]])
            return context.get_dummy_value() if returns is types.void else value

        return returns(types.int64), codegen

    return function


malloc = _c_function("malloc", I64, types.int64)  # malloc(bytes), 0 if there is no memory
free = _c_function("free", ir.VoidType(), types.void)
yield_processor = _c_function("sched_yield", I64, types.int64)  # its argument is not used


@intrinsic
def load_bfloat16(typing_context: Any, address: Any) -> Any:
    """A bfloat16 number as float32."""

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        bits = builder.load(pointer(builder, arguments[0], ir.IntType(16)))
        return builder.bitcast(builder.shl(builder.zext(bits, I32), ir.Constant(I32, 16)), ir.FloatType())

    return types.float32(types.int64), codegen


@intrinsic
def fill_zeros(typing_context: Any, address: Any, size: Any) -> Any:
    """Set `size` bytes to zero."""

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        kind = ir.FunctionType(ir.VoidType(), [I8.as_pointer(), I8, I64, ir.IntType(1)])
        memset = declared(builder.module, "llvm.memset.p0.i64", kind)
        to = pointer(builder, arguments[0], I8)
        builder.call(memset, [to, ir.Constant(I8, 0), arguments[1], ir.Constant(ir.IntType(1), 0)])
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), codegen


@intrinsic
def copy_bytes(typing_context: Any, to: Any, source: Any, size: Any) -> Any:
    """Copy `size` bytes from one address to another."""

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        kind = ir.FunctionType(ir.VoidType(), [I8.as_pointer(), I8.as_pointer(), I64, ir.IntType(1)])
        memcpy = declared(builder.module, "llvm.memcpy.p0.p0.i64", kind)
        places = [pointer(builder, argument, I8) for argument in arguments[:2]]
        builder.call(memcpy, [*places, arguments[2], ir.Constant(ir.IntType(1), 0)])
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64), codegen


def prefetch_line(builder: Any, address: Any) -> None:
    """Emit `prefetch` into the L2 cache.

    A core has few requests in flight to its L1 cache. Waiting for them halved the rate at which attention reads pages:
    12 to 14 GB/s, against 22 to 29 with this hint (32 rows of 500 keys, two cores of a Zen 5).
    """
    kind = ir.FunctionType(ir.VoidType(), [I8.as_pointer(), I32, I32, I32])
    read, second_level, data = (ir.Constant(I32, value) for value in (0, 2, 1))
    to = pointer(builder, address, I8)
    builder.call(declared(builder.module, "llvm.prefetch.p0", kind), [to, read, second_level, data])


@intrinsic
def prefetch(typing_context: Any, address: Any) -> Any:
    """Tell the processor that 64 bytes will be read soon. The address need not be valid."""

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        prefetch_line(builder, arguments[0])
        return context.get_dummy_value()

    return types.void(types.int64), codegen


@intrinsic
def pause(typing_context: Any) -> Any:
    """Tell the processor that the thread waits in a loop. A compiler barrier on processors without such a hint."""

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        builder.fence("acq_rel")
        return context.get_dummy_value()

    return types.void(), codegen


@intrinsic
def thread_limit(typing_context: Any) -> Any:
    """Largest number of threads: a variable of the machine code. `library.py` sets it when it loads the code."""

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        variable = builder.module.globals.get(THREAD_LIMIT)
        if variable is None:
            variable = ir.GlobalVariable(builder.module, I64, THREAD_LIMIT)
            variable.linkage, variable.initializer = "weak", ir.Constant(I64, 1)
        return builder.load(variable)

    return types.int64(), codegen


def error(code: int, message: str) -> Any:
    """Make a function that returns an XLA error. create: address of XLA_FFI_Error_Create. code: XLA_FFI_Error_Code."""

    @intrinsic
    def make(typing_context: Any, create: Any) -> Any:
        def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            text = builder.ptrtoint(context.insert_const_string(builder.module, message), I64)
            fields = [ir.Constant(I64, ERROR_CREATE_SIZE), ir.Constant(I64, 0), text, ir.Constant(I64, code)]
            request = builder.alloca(I64, len(fields))
            for index, field in enumerate(fields):
                builder.store(field, builder.gep(request, [ir.Constant(I64, index)]))
            kind = ir.FunctionType(I64, [I64])
            return builder.call(pointer(builder, arguments[0], kind), [builder.ptrtoint(request, I64)])

        return types.int64(types.int64), codegen

    return make
