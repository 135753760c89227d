"""The few calls of the CUDA driver that torch does not offer, through ctypes.

The driver's handles are those of the runtime: the ``cuda_event`` of a ``torch.cuda.Event``, the ``cuda_stream`` of a
stream. Its calls act on the calling thread's current context; torch uses each device's primary context.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
from collections.abc import Iterator

from protrain_compile.errors import ProtrainError

NOT_SUPPORTED = 801
"""``CUDA_ERROR_NOT_SUPPORTED``"""

WAIT_UNTIL_AT_LEAST = 0
"""``CU_STREAM_WAIT_VALUE_GEQ``: by the sign of the difference, so that values may wrap around."""

_REGISTER_PORTABLE_AND_MAPPED = 0x1 | 0x2


class CudaDriverError(ProtrainError, RuntimeError):
    """A call of the CUDA driver failed.

    Attributes:
        code: The driver's result.
    """

    def __init__(self, function: str, name: str, code: int) -> None:
        super().__init__(f"{function} returned {name} ({code})")
        self.code = code


class CudaDriver:
    """The driver's library; methods raise CudaDriverError."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library
        pointer, integer = ctypes.c_void_p, ctypes.c_int
        signatures: dict[str, list[object]] = {
            "cuGetErrorName": [integer, ctypes.POINTER(ctypes.c_char_p)],
            "cuDeviceGet": [ctypes.POINTER(integer), integer],
            "cuDevicePrimaryCtxRetain": [ctypes.POINTER(pointer), integer],
            "cuCtxPushCurrent_v2": [pointer],
            "cuCtxPopCurrent_v2": [ctypes.POINTER(pointer)],
            "cuMemHostRegister_v2": [pointer, ctypes.c_size_t, ctypes.c_uint],
            "cuMemHostGetDevicePointer_v2": [ctypes.POINTER(ctypes.c_uint64), pointer, ctypes.c_uint],
            "cuStreamWaitValue32_v2": [pointer, ctypes.c_uint64, ctypes.c_uint32, ctypes.c_uint],
        }
        for name, arguments in signatures.items():
            function = getattr(library, name)
            function.restype, function.argtypes = integer, arguments

    def address(self, function: str) -> int:
        """Return the address of a driver function, for C code to call."""
        return ctypes.cast(getattr(self._library, function), ctypes.c_void_p).value or 0

    def error(self, function: str, code: int) -> CudaDriverError:
        """Return the error for a result of ``function``."""
        name = ctypes.c_char_p()
        self._library.cuGetErrorName(code, ctypes.byref(name))
        return CudaDriverError(function, name.value.decode() if name.value else "an unknown error", code)

    def primary_context(self, device: int) -> int:
        """Return the primary context of a device, which stays until the process ends."""
        number, context = ctypes.c_int(), ctypes.c_void_p()
        self._call("cuDeviceGet", ctypes.byref(number), device)
        self._call("cuDevicePrimaryCtxRetain", ctypes.byref(context), number)
        assert context.value
        return context.value

    def map_host_memory(self, context: int, address: int, size_bytes: int) -> int:
        """Pin whole pages of host memory for all devices; return the address under which they see it."""
        seen = ctypes.c_uint64()
        with self._current(context):
            self._call("cuMemHostRegister_v2", address, size_bytes, _REGISTER_PORTABLE_AND_MAPPED)
            self._call("cuMemHostGetDevicePointer_v2", ctypes.byref(seen), address, 0)
        return seen.value

    def make_stream_wait(self, context: int, stream: int, address: int, value: int) -> None:
        """Make a stream wait until the int32 at the device address ``address`` has reached ``value``.

        The driver does not know what the wait depends on: everything that does must have been launched before.
        """
        with self._current(context):
            self._call("cuStreamWaitValue32_v2", stream, address, value & 0xFFFF_FFFF, WAIT_UNTIL_AT_LEAST)

    @contextlib.contextmanager
    def _current(self, context: int) -> Iterator[None]:
        self._call("cuCtxPushCurrent_v2", context)
        try:
            yield
        finally:
            self._call("cuCtxPopCurrent_v2", ctypes.byref(ctypes.c_void_p()))

    def _call(self, function: str, *arguments: object) -> None:
        code: int = getattr(self._library, function)(*arguments)
        if code != 0:
            raise self.error(function, code)


@functools.cache
def load_driver() -> CudaDriver:
    """Return the driver that torch uses.

    Raises:
        OSError: If there is none.
    """
    return CudaDriver(ctypes.CDLL("libcuda.so.1"))
