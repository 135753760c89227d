"""Builds ``kernel.c`` with the system compiler, once per machine, and loads it with ctypes.

The library lies in the user's cache folder under a name made of everything that its machine code depends on: the
source, the compiler's version, the flags, and the processor's model and features. It is compiled beside its final
name and renamed, so that any number of processes may build it at once.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import logging
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

log = logging.getLogger(__name__)

SOURCE = Path(__file__).with_name("kernel.c")

FLAGS = (
    *("-std=gnu11", "-O3", "-shared", "-fPIC", "-pthread", "-fopenmp-simd"),
    *("-fno-math-errno", "-fno-trapping-math", "-ffp-contract=fast"),
)
"""What lets the loops vectorise, square root and division included, with infinities and NaN still right."""

TARGET_FLAGS = (("-march=native",), ("-mcpu=native",), ())
"""Tried in turn: not every compiler knows its own processor by the same name."""

COMPILE_TIMEOUT_S = 120


class SegmentStruct(ctypes.Structure):
    """``segment`` of kernel.c."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in ("begin", "end", "first_block")),
        ("kind", ctypes.c_int32),
        *((name, ctypes.c_float) for name in ("gradient_factor", "decay", "l2", "moment1_keep", "moment1_rate")),
        *((name, ctypes.c_float) for name in ("moment2_keep", "moment2_rate", "moment2_correction")),
        *((name, ctypes.c_float) for name in ("eps", "step_size")),
    )


class UpdateStruct(ctypes.Structure):
    """``update_job`` of kernel.c."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("param", "companion", "moment1", "moment2", "moment2_max")),
        *((name, ctypes.c_void_p) for name in ("gradient", "segments")),
        ("segment_count", ctypes.c_int64),
        *((name, ctypes.c_int32) for name in ("format", "gradient_dtype")),
    )


class ArrayStruct(ctypes.Structure):
    """``array_job`` of kernel.c."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("target", "source", "sums")),
        ("count", ctypes.c_int64),
        *((name, ctypes.c_int32) for name in ("target_dtype", "source_dtype")),
    )


class FailureStruct(ctypes.Structure):
    """``failure`` of kernel.c."""

    _fields_ = (("ticket", ctypes.c_int64), *((name, ctypes.c_int32) for name in ("operation", "stage", "code")))


@functools.cache
def load_library() -> ctypes.CDLL | None:
    """Return the kernel library, built if need be; None, with one logged reason, where that is impossible."""
    return build_library(find_compilers(os.environ), cache_folder(os.environ))


def find_compilers(environ: Mapping[str, str]) -> list[list[str]]:
    """Return the C compilers to try, as command prefixes: ``CC`` first, then cc, gcc and clang on the path."""
    named = shlex.split(environ.get("CC", ""))
    found = [shutil.which(name, path=environ.get("PATH")) for name in ("cc", "gcc", "clang")]
    return ([named] if named else []) + [[path] for path in found if path]


def cache_folder(environ: Mapping[str, str]) -> Path:
    """Return the folder for built libraries under the user's cache folder."""
    base = environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path("~/.cache").expanduser()) / "protrain" / "kernels"


def build_library(compilers: Sequence[Sequence[str]], folder: Path, source: Path = SOURCE) -> ctypes.CDLL | None:
    """Return ``source`` compiled by the first of ``compilers`` that can, or None.

    Args:
        compilers: Command prefixes, as of :func:`find_compilers`.
        folder: Where the library is kept; a temporary folder takes its place if it cannot be written.
        source: The C file.
    """
    for compiler in compilers:
        version = _compiler_version(compiler)
        if version is None:
            continue
        for target in TARGET_FLAGS:
            library = _load_or_compile([*compiler, *FLAGS, *target], version, folder, source)
            if library is not None:
                return library
    tried = ", ".join(shlex.join(compiler) for compiler in compilers) or "cc, gcc and clang are not on the path"
    log.warning(
        "host updates run in torch operations, several times slower: no C compiler built %s (%s); "
        "install gcc or clang, or name one in CC",
        source.name,
        tried,
    )
    return None


def _load_or_compile(command: list[str], version: str, folder: Path, source: Path) -> ctypes.CDLL | None:
    name = f"host-update-{_fingerprint(command, version, source)}.so"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        return _open(folder / name) or _compile(command, source, folder / name)
    except OSError as error:
        log.info("cannot keep %s in %s (%s); building it in a temporary folder", name, folder, error)
    with tempfile.TemporaryDirectory(prefix="protrain-") as temporary:
        return _compile(command, source, Path(temporary) / name)


def _fingerprint(command: list[str], version: str, source: Path) -> str:
    parts = (source.read_text(), shlex.join(command), version, platform.machine(), _processor())
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:24]


def _processor() -> str:
    """Return the processor's model and features, which decide what ``-march=native`` emits."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    kinds = ("model name", "flags", "Features", "CPU part", "CPU implementer")
    return "\n".join(sorted({line for line in lines if line.startswith(kinds)}))


def _compiler_version(compiler: Sequence[str]) -> str | None:
    try:
        result = subprocess.run([*compiler, "--version"], capture_output=True, text=True, timeout=30, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        log.info("%s is not usable: %s", shlex.join(compiler), error)
        return None
    return result.stdout


def _compile(command: list[str], source: Path, library: Path) -> ctypes.CDLL | None:
    """Compile into a private file and rename it to ``library``; None if the compiler refuses.

    Raises:
        OSError: If the folder cannot be written.
    """
    handle, name = tempfile.mkstemp(dir=library.parent, prefix=".building-", suffix=".so")
    os.close(handle)
    built = Path(name)
    try:
        subprocess.run(
            [*command, str(source), "-o", name, "-lm"],
            capture_output=True,
            text=True,
            timeout=COMPILE_TIMEOUT_S,
            check=True,
        )
        _seal(built)
        built.chmod(0o755)
        built.replace(library)
    except subprocess.CalledProcessError as error:
        log.info("%s failed: %s", shlex.join(command), error.stderr.strip()[-2000:])
        return None
    except subprocess.TimeoutExpired:
        log.info("%s took longer than %d s", shlex.join(command), COMPILE_TIMEOUT_S)
        return None
    finally:
        built.unlink(missing_ok=True)
    return _open(library)


def _seal(path: Path) -> None:
    """Append a checksum to a library; loaders ignore what follows the last section."""
    with path.open("ab") as file:
        file.write(_checksum(path.read_bytes()))


def _is_whole(path: Path) -> bool:
    """Tell whether a sealed library is as it was written; loading a truncated one would crash the process."""
    data = path.read_bytes()
    return data[-_CHECKSUM_BYTES:] == _checksum(data[:-_CHECKSUM_BYTES])


_CHECKSUM_BYTES = 32


def _checksum(data: bytes) -> bytes:
    return hashlib.sha256(data).digest()


def _open(path: Path) -> ctypes.CDLL | None:
    """Return the library at ``path`` with its functions declared; None if it is absent or broken."""
    try:
        if not _is_whole(path):
            return None
        library = ctypes.CDLL(str(path))
        _declare(library)
    except (OSError, AttributeError):
        return None
    return library


def _declare(library: ctypes.CDLL) -> None:
    pool = queue = event = address = ctypes.c_void_p
    ticket, milliseconds = ctypes.c_int64, ctypes.c_int64
    array, update, segments = (ctypes.POINTER(kind) for kind in (ArrayStruct, UpdateStruct, SegmentStruct))
    signatures: dict[str, tuple[object, list[object]]] = {
        "protrain_pool_create": (pool, [ctypes.c_int]),
        "protrain_pool_threads": (ctypes.c_int, [pool]),
        "protrain_pool_destroy": (None, [pool]),
        "protrain_update": (None, [pool, update, segments]),
        "protrain_accumulate": (None, [pool, array]),
        "protrain_convert": (None, [pool, array]),
        "protrain_square_sum": (ctypes.c_double, [pool, array]),
        "protrain_scale": (None, [pool, array]),
        "protrain_queue_create": (queue, [pool]),
        "protrain_queue_attach": (None, [queue, address, address, address, address]),
        "protrain_queue_update": (ticket, [queue, update, segments, event]),
        "protrain_queue_array": (ticket, [queue, ctypes.c_int, array, event]),
        "protrain_queue_submitted": (ticket, [queue]),
        "protrain_queue_done": (ticket, [queue]),
        "protrain_queue_wait": (ctypes.c_int, [queue, ticket, milliseconds]),
        "protrain_queue_take_failure": (FailureStruct, [queue]),
        "protrain_queue_end": (ctypes.c_int, [queue, milliseconds]),
        "protrain_queue_release": (None, [queue]),
    }
    for name, (result, arguments) in signatures.items():
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments
