"""Threads follow the cores that this process may use, not OMP_NUM_THREADS."""

import os

import pytest

from protrain_compile.updates.threads import cpu_quota, local_ranks, threads_of_share, update_threads

CORES = [(0, 1), (1, 1), (2, 1), (3, 2), (7, 6), (8, 6), (15, 13), (16, 13), (64, 61)]


@pytest.mark.parametrize(("cores", "threads"), CORES)
def test_cores_are_left_for_launching(cores, threads):
    assert threads_of_share(cores) == threads


@pytest.mark.parametrize(("text", "ranks"), [("", 1), ("4", 4), ("0", 1), ("many", 1)])
def test_local_ranks(text, ranks):
    assert local_ranks({"LOCAL_WORLD_SIZE": text}) == ranks


def test_affinity_counts_and_omp_num_threads_does_not(monkeypatch, tmp_path):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(16)))
    assert update_threads({"OMP_NUM_THREADS": "1"}, tmp_path, tmp_path) == 13
    assert update_threads({"OMP_NUM_THREADS": "1", "LOCAL_WORLD_SIZE": "4"}, tmp_path, tmp_path) == 3


def write(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def test_quota_of_version_2_is_the_least_along_the_path(tmp_path, monkeypatch):
    write(tmp_path / "proc/self/cgroup", "0::/job/step\n")
    write(tmp_path / "cg/job/step/cpu.max", "max 100000\n")
    write(tmp_path / "cg/job/cpu.max", "400000 100000\n")
    assert cpu_quota(tmp_path / "proc", tmp_path / "cg") == 4.0
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(128)))
    assert update_threads({}, tmp_path / "proc", tmp_path / "cg") == 3


def test_quota_of_version_1(tmp_path):
    write(tmp_path / "proc/self/cgroup", "4:cpu,cpuacct:/docker/abc\n0::/\n")
    write(tmp_path / "cg/cpu,cpuacct/docker/abc/cpu.cfs_quota_us", "250000\n")
    write(tmp_path / "cg/cpu,cpuacct/docker/abc/cpu.cfs_period_us", "100000\n")
    write(tmp_path / "cg/cpu,cpuacct/cpu.cfs_quota_us", "-1\n")
    write(tmp_path / "cg/cpu,cpuacct/cpu.cfs_period_us", "100000\n")
    assert cpu_quota(tmp_path / "proc", tmp_path / "cg") == 2.5


def test_no_quota(tmp_path):
    assert cpu_quota(tmp_path / "proc", tmp_path / "cg") is None
