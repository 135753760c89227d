from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from protrain_compile.errors import ProfileError
from protrain_compile.profile import (
    ArtefactCost,
    CollectiveCost,
    HardwareProfile,
    HostUpdateRate,
    LinkRate,
    NodeCost,
    NvmeRate,
    Profile,
    TemplateProfile,
    shipped_profiles,
)

TEMPLATE = TemplateProfile(
    parts={"forward": ArtefactCost(1.5, 1024, 7), "backward": ArtefactCost(3.0)},
    nodes=(NodeCost("mm", "aten.mm.default", 0.5, -64, 128),),
    measured=True,
)


def hardware(*rates: HostUpdateRate) -> HardwareProfile:
    return HardwareProfile(
        name="device",
        device_bytes=1 << 30,
        host_bytes=2 << 30,
        cores=4,
        matmul_tflops={"bfloat16": 100.0},
        device_gb_per_s=1000.0,
        h2d=LinkRate(50.0, 40.0, 20.0),
        d2h=LinkRate(51.0, 41.0, 21.0),
        host_updates=rates,
        device_update_gparams_per_s={"split": 10.0},
        launch_us=5.0,
        collectives=(CollectiveCost("all_gather", 1 << 20, 2, 0.1),),
        nvme=NvmeRate(2.0, 3.0),
        source="made up",
    )


def test_round_trips() -> None:
    profile = Profile(hardware(HostUpdateRate("split", 4, 2.0, 1.0)), (TEMPLATE, TemplateProfile({})))
    assert Profile.from_json(profile.to_json()) == profile
    assert TemplateProfile.from_json(TEMPLATE.to_json()) == TEMPLATE
    assert HardwareProfile.from_json(profile.hardware.to_json()) == profile.hardware


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('"ms": 1.5', '"ms": "fast"', r"template.parts.forward.ms must be a number"),
        ('"forward"', '"sideways"', r"template.parts must be one of forward, recompute, .*, got 'sideways'"),
        ('"inside_bytes": 128', '"inside_bytes": 1.5', r"template.nodes\[0\].inside_bytes must be a whole number"),
    ],
)
def test_a_malformed_template_names_the_field(old: str, new: str, message: str) -> None:
    text = TEMPLATE.to_json()
    assert old in text
    with pytest.raises(ProfileError, match=message):
        TemplateProfile.from_json(text.replace(old, new))


def test_ranks_share_a_host() -> None:
    """As many as there are devices; a device and its link are a rank's own."""
    whole = dataclasses.replace(hardware(HostUpdateRate("split", 13, 4.0, 2.0)), cores=16, devices=8)
    part = whole.share(4)
    assert (part.host_bytes, part.cores, part.devices) == ((2 << 30) // 4, 4, 2)
    assert part.host_updates == (HostUpdateRate("split", 3, 1.0, 0.5),)
    assert (part.h2d, part.device_bytes) == (whole.h2d, whole.device_bytes)
    assert whole.share(64) == whole.share(8)
    assert whole.share(1) == whole
    assert HardwareProfile.load("h200").share(8) == HardwareProfile.load("h200")  # one GPU's share already


def test_impossible_figures_are_refused() -> None:
    with pytest.raises(ProfileError, match="NodeCost: ms must be at least 0"):
        NodeCost("mm", "aten.mm.default", -1.0, 0, 0)
    with pytest.raises(ProfileError, match="ArtefactCost: launches must be at least 0"):
        ArtefactCost(1.0, -1, -1)
    with pytest.raises(ProfileError, match="LinkRate: both_gb_per_s must be above 0"):
        LinkRate(1.0, 0.0, 1.0)
    with pytest.raises(ProfileError, match=r"matmul_tflops.bfloat16 must be above 0"):
        dataclasses.replace(hardware(), matmul_tflops={"bfloat16": 0.0})
    with pytest.raises(ProfileError, match="matmul_tflops must name at least one dtype"):
        dataclasses.replace(hardware(), matmul_tflops={})


def test_host_updates_are_interpolated_between_threads() -> None:
    measured = hardware(
        HostUpdateRate("split", 4, 2.0, 1.0), HostUpdateRate("split", 8, 4.0, 3.0), HostUpdateRate("fp32", 8, 3.0, 2.0)
    )
    assert measured.host_update("split") == HostUpdateRate("split", 8, 4.0, 3.0)
    assert measured.host_update("split", 6) == HostUpdateRate("split", 6, 3.0, 2.0)
    assert measured.host_update("split", 1) == HostUpdateRate("split", 1, 2.0, 1.0)
    assert measured.host_update("split", 64) == HostUpdateRate("split", 64, 4.0, 3.0)
    assert measured.host_update("fp32", 4).gparams_per_s == 3.0


def test_a_format_that_was_not_measured_has_the_slowest_rate() -> None:
    measured = hardware(HostUpdateRate("split", 8, 4.0, 3.0), HostUpdateRate("fp32", 8, 3.0, 2.0))
    assert measured.host_update("fp16").gparams_per_s == 3.0
    with pytest.raises(ProfileError, match="host_updates is empty"):
        hardware().host_update("split")


def test_load(tmp_path: Path) -> None:
    path = tmp_path / "mine.json"
    path.write_text(hardware().to_json())
    assert HardwareProfile.load(path) == hardware()
    path.write_text("{")
    with pytest.raises(ProfileError, match=r"hardware profile .*mine.json is not JSON"):
        HardwareProfile.load(path)
    with pytest.raises(ProfileError, match=r"'nothing': no such file, and the package has .*h200"):
        HardwareProfile.load("nothing")


@pytest.mark.parametrize("name", ["h200", "H200"])
def test_the_h200_comes_with_the_package(name: str) -> None:
    shipped = HardwareProfile.load(name)
    assert "h200" in shipped_profiles()
    assert shipped.h2d.alone_gb_per_s > shipped.h2d.both_gb_per_s > shipped.h2d.beside_updates_gb_per_s
    assert all(rate.threads < shipped.cores for rate in shipped.host_updates)
    assert "protrain profile" in shipped.source
