"""The build of the C kernel: cached, safe beside other builds, and a clear word where it cannot be had."""

import ctypes
import logging
import os
import stat
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from protrain_compile.updates import host, native

COMPILERS = native.find_compilers(os.environ)
needs_compiler = pytest.mark.skipif(not COMPILERS, reason="no C compiler")


def counting_compiler(tmp_path):
    """A compiler that adds a line to a log for each compilation."""
    script, log = tmp_path / "counted-cc", tmp_path / "log"
    count = f'case "$*" in *--version*) ;; *) echo run >> {log} ;; esac'
    script.write_text(f'#!/bin/sh\n{count}\nexec {COMPILERS[-1][0]} "$@"\n')
    script.chmod(script.stat().st_mode | stat.S_IXUSR)
    return [str(script)], lambda: log.read_text().count("run") if log.exists() else 0


@needs_compiler
def test_built_once_then_loaded(tmp_path):
    compiler, runs = counting_compiler(tmp_path)
    for _ in range(3):
        assert native.build_library([compiler], tmp_path / "cache") is not None
    assert runs() == 1
    assert [path.suffix for path in (tmp_path / "cache").iterdir()] == [".so"]


@needs_compiler
def test_another_source_is_another_library(tmp_path):
    other = tmp_path / "kernel.c"
    other.write_text(native.SOURCE.read_text() + "\n/* changed */\n")
    for source in (native.SOURCE, other):
        assert native.build_library(COMPILERS, tmp_path / "cache", source) is not None
    assert len(list((tmp_path / "cache").iterdir())) == 2


@needs_compiler
def test_builds_at_once_leave_one_whole_library(tmp_path):
    with ThreadPoolExecutor(4) as pool:
        libraries = list(pool.map(lambda _: native.build_library(COMPILERS, tmp_path / "cache"), range(4)))
    assert all(libraries)
    assert len(list((tmp_path / "cache").iterdir())) == 1


@needs_compiler
def test_a_broken_library_in_the_cache_is_built_again(tmp_path):
    assert native.build_library(COMPILERS, tmp_path / "first") is not None
    (good,) = (tmp_path / "first").iterdir()
    (tmp_path / "second").mkdir()
    (tmp_path / "second" / good.name).write_bytes(good.read_bytes()[:1000])
    assert native.build_library(COMPILERS, tmp_path / "second") is not None


@needs_compiler
def test_a_cache_that_cannot_be_written_does_not_matter(tmp_path):
    blocked = tmp_path / "file"
    blocked.write_text("")
    assert native.build_library(COMPILERS, blocked / "cache") is not None


@needs_compiler
def test_an_unusable_compiler_is_passed_over(tmp_path):
    compilers = [["/nonexistent/cc"], [sys.executable], *COMPILERS]
    assert native.build_library(compilers, tmp_path) is not None


def test_without_a_compiler_one_warning_says_what_to_do(tmp_path, caplog):
    with caplog.at_level(logging.WARNING):
        assert native.build_library([], tmp_path) is None
    (record,) = caplog.records
    assert "install gcc or clang" in record.getMessage()


@needs_compiler
def test_a_source_that_does_not_compile_gives_none(tmp_path, caplog):
    bad = tmp_path / "bad.c"
    bad.write_text("this is not C")
    assert native.build_library(COMPILERS[:1], tmp_path / "cache", bad) is None
    assert list((tmp_path / "cache").iterdir()) == []


def test_the_compiler_named_by_the_user_comes_first():
    found = native.find_compilers({"CC": "ccache my-cc -m64", "PATH": os.environ["PATH"]})
    assert found[0] == ["ccache", "my-cc", "-m64"]
    assert native.find_compilers({"PATH": ""}) == []


def test_the_cache_folder_follows_the_users_settings(tmp_path):
    assert native.cache_folder({"XDG_CACHE_HOME": str(tmp_path)}) == tmp_path / "protrain" / "kernels"


def test_torch_operations_take_over_without_a_library(monkeypatch):
    monkeypatch.setattr(host, "load_library", lambda: None)
    updater = host.make_host_updater(2)
    assert isinstance(updater, host.TorchUpdater)
    assert updater.square_sum(torch.ones(5)) == 5


def test_structures_have_the_sizes_of_kernel_c():
    assert ctypes.sizeof(native.SegmentStruct) == 72
    assert ctypes.sizeof(native.UpdateStruct) == 72
    assert ctypes.sizeof(native.ArrayStruct) == 40
    assert ctypes.sizeof(native.FailureStruct) == 24
