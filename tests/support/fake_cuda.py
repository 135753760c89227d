"""A stand-in for the CUDA driver: the calls that the host worker makes, with events and streams that tests steer.

``build`` compiles it; ``FakeCuda`` hands out events, streams and the driver. A fake stream that is made to wait polls
the flag on a thread of its own and then counts as passed. Calls without a current context fail, as the driver's do.
"""

from __future__ import annotations

import ctypes
import subprocess
from pathlib import Path

import torch

from protrain_compile.runtime.cuda_driver import CudaDriver

SOURCE = r"""
#include <pthread.h>
#include <stdint.h>
#include <stdlib.h>
#include <unistd.h>

typedef struct { pthread_mutex_t lock; pthread_cond_t changed; int happened, code; } event;
typedef struct { const int32_t *flag; int32_t value; int waits, passed, code; } stream;

static __thread void *current;
static int register_code;

int cuGetErrorName(int code, const char **name) {
    *name = code == 801 ? "CUDA_ERROR_NOT_SUPPORTED" : code == 719 ? "CUDA_ERROR_LAUNCH_FAILED"
          : code == 201 ? "CUDA_ERROR_INVALID_CONTEXT" : NULL;
    return *name == NULL;
}
int cuDeviceGet(int *device, int ordinal) { *device = ordinal; return 0; }
int cuDevicePrimaryCtxRetain(void **context, int device) { *context = (void *)(uintptr_t)(0xc000 + device); return 0; }
int cuCtxSetCurrent(void *context) { current = context; return context == NULL ? 201 : 0; }
int cuCtxPushCurrent_v2(void *context) { current = context; return 0; }
int cuCtxPopCurrent_v2(void **context) { *context = current; current = NULL; return 0; }
int cuMemHostRegister_v2(void *address, size_t size, unsigned flags) {
    return current == NULL ? 201 : flags != 3 || size % 4096 ? 1 : register_code;
}
int cuMemHostGetDevicePointer_v2(uint64_t *seen, void *address, unsigned flags) {
    *seen = (uint64_t)(uintptr_t)address;
    return 0;
}
int cuEventSynchronize(event *e) {
    if (current == NULL) return 201;
    pthread_mutex_lock(&e->lock);
    while (!e->happened) pthread_cond_wait(&e->changed, &e->lock);
    pthread_mutex_unlock(&e->lock);
    return e->code;
}
static void *poll_flag(void *argument) {
    stream *s = argument;
    while ((int32_t)((uint32_t)__atomic_load_n(s->flag, __ATOMIC_ACQUIRE) - (uint32_t)s->value) < 0) usleep(100);
    __atomic_store_n(&s->passed, 1, __ATOMIC_RELEASE);
    return NULL;
}
int cuStreamWaitValue32_v2(stream *s, uint64_t address, uint32_t value, unsigned flags) {
    if (s->code || current == NULL) return current == NULL ? 201 : s->code;
    s->flag = (const int32_t *)(uintptr_t)address;
    s->value = (int32_t)value;
    s->waits++;
    pthread_t thread;
    return pthread_create(&thread, NULL, poll_flag, s) || pthread_detach(thread);
}

event *fake_event(int code) {
    event *e = calloc(1, sizeof(event));
    pthread_mutex_init(&e->lock, NULL);
    pthread_cond_init(&e->changed, NULL);
    e->code = code;
    return e;
}
void fake_event_happen(event *e) {
    pthread_mutex_lock(&e->lock);
    e->happened = 1;
    pthread_cond_broadcast(&e->changed);
    pthread_mutex_unlock(&e->lock);
}
stream *fake_stream(int code) { stream *s = calloc(1, sizeof(stream)); s->code = code; return s; }
int fake_stream_waits(const stream *s) { return s->waits; }
int fake_stream_passed(const stream *s) { return __atomic_load_n(&s->passed, __ATOMIC_ACQUIRE); }
int fake_happen_and_await(event *e, const stream *s) { /* through PyDLL: with the GIL held */
    fake_event_happen(e);
    for (int i = 0; i < 200000 && !fake_stream_passed(s); i++) usleep(100);
    return fake_stream_passed(s);
}
int32_t fake_stream_value(const stream *s) { return s->value; }
void fake_refuse_pinning(int code) { register_code = code; }
"""


def build(compiler: list[str], folder: Path) -> Path:
    """Compile the stand-in into ``folder``; return the library."""
    source, library = folder / "fake_cuda.c", folder / "fake_cuda.so"
    source.write_text(SOURCE)
    subprocess.run([*compiler, "-shared", "-fPIC", "-pthread", str(source), "-o", str(library)], check=True)
    return library


class FakeCuda:
    """The stand-in's handles."""

    def __init__(self, library: Path) -> None:
        self.library = ctypes.CDLL(str(library))
        for name in ("fake_event", "fake_stream"):
            getattr(self.library, name).restype = ctypes.c_void_p
        for name in ("fake_event_happen", "fake_stream_waits", "fake_stream_passed", "fake_stream_value"):
            getattr(self.library, name).argtypes = [ctypes.c_void_p]

    def driver(self) -> CudaDriver:
        """Return a driver that calls the stand-in."""
        return CudaDriver(self.library)

    def event(self, code: int = 0, device: int = 0) -> FakeEvent:
        """Return an event that has not happened; waiting for it gives ``code``."""
        return FakeEvent(self.library, code, device)

    def stream(self, code: int = 0, device: int = 0) -> FakeStream:
        """Return a stream; making it wait gives ``code``."""
        return FakeStream(self.library, code, device)


class FakeEvent:
    """Looks like a recorded ``torch.cuda.Event``."""

    def __init__(self, library: ctypes.CDLL, code: int, device: int) -> None:
        self._library = library
        self.cuda_event: int = library.fake_event(code)
        self.device = torch.device("cuda", device)

    def happen(self) -> None:
        """Let waiting for it end."""
        self._library.fake_event_happen(self.cuda_event)

    def synchronize(self) -> None:
        """Never called: the dispatcher waits."""
        raise AssertionError("the calling thread must not wait for an event of the device")


class FakeStream:
    """Looks like a ``torch.cuda.Stream``."""

    def __init__(self, library: ctypes.CDLL, code: int, device: int) -> None:
        self._library = library
        self.cuda_stream: int = library.fake_stream(code)
        self.device = torch.device("cuda", device)

    @property
    def waits(self) -> int:
        """How often it was made to wait."""
        return int(self._library.fake_stream_waits(self.cuda_stream))

    @property
    def passed(self) -> bool:
        """Whether a wait was fulfilled."""
        return bool(self._library.fake_stream_passed(self.cuda_stream))

    @property
    def value(self) -> int:
        """What it waits for."""
        return int(self._library.fake_stream_value(self.cuda_stream))
