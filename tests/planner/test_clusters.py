"""Presets: figures that hang together, names that published measurements use, errors that name what is near."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from plait.core.cluster_file import dump, parse
from plait.core.errors import ConfigError
from plait.planner import clusters
from plait.planner.clusters import cluster, device, local, names


@pytest.mark.parametrize("name", [name for name in names() if name != "local"])
def test_presets_make_sense(name: str) -> None:
    found = cluster(name, 4096)
    near, far = found.tiers
    assert found.devices == 4096
    assert near.bandwidth > far.bandwidth
    assert far.size >= 4096
    half = found.device.peaks["fp16"]
    assert half > found.device.peaks["fp32"]
    assert found.device.peaks.get("bf16") == (None if name.startswith("v100") else half)
    # The operations a byte at which products stop being bound by memory: hundreds on every device of the last decade
    # but one whose rate was cut for export.
    assert (30 if name == "h20" else 100) < half / found.device.bandwidth < 600
    assert found.device.source
    assert parse(dump(found)) == found


@pytest.mark.parametrize(
    ("name", "bf16", "gib", "domain"),
    [
        ("a100-80g-pcie", 312e12, 80, 8),
        ("h20", 148e12, 96, 8),
        ("a100-80g", 312e12, 80, 8),
        ("h200", 989e12, 141, 8),
        ("gb200", 2500e12, 186, 72),
        ("gh200", 989e12, 96, 4),
    ],
)
def test_figures_of_the_data_sheets(name: str, bf16: float, gib: float, domain: int) -> None:
    found = cluster(name, 8)
    assert found.device.peaks["bf16"] == bf16
    assert found.device.memory == pytest.approx(gib * 1024**3, rel=0.01)
    assert found.tiers[0].size == domain


def test_devices_by_published_names() -> None:
    assert device("A100-80GB-SXM") == device("a100-80g")
    assert device("H100-96GB-HBM2e-500W").bandwidth == 2.4e12
    assert device("A100-80GB SXM").name == "A100-80GB-SXM"
    assert device("V100-SXM2-32GB").name == "V100-32GB-SXM"
    assert device("NVIDIA A100 40GB PCIe").name == "A100-40GB-PCIe"
    assert device("H100 SXM5 80GB HBM3").name == "H100-80GB-SXM"
    assert device("TPU v5p").name == "TPU-v5p"
    with pytest.raises(ConfigError):
        device("RTX 4090")
    with pytest.raises(ConfigError):
        device("V100 16GB")


def test_every_published_device_is_known(shared: Path) -> None:
    with (shared / "published" / "published.jsonl").open(encoding="utf-8") as lines:
        found = {json.loads(line)["cluster"]["device"] for line in lines}
    for name in found:
        assert device(name).peaks["bf16"] > 0


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("h10", "neither a preset nor a file; nearest: h100"),
        ("a100-80gb", "nearest: a100-80g"),
        ("?", "known: a100-80g"),
    ],
)
def test_an_unknown_preset_names_the_nearest(name: str, said: str) -> None:
    with pytest.raises(ConfigError) as error:
        cluster(name, 8)
    assert said in str(error.value)
    assert "\n" not in str(error.value)


def test_unknown_devices_missing_files_and_no_devices() -> None:
    with pytest.raises(ConfigError, match="device 'A1000' is unknown"):
        device("A1000")
    with pytest.raises(ConfigError, match=r"nowhere\.toml cannot be read"):
        cluster("nowhere.toml", 8)
    with pytest.raises(ConfigError, match="devices=0: at least 1"):
        cluster("h100", 0)


def test_a_file_is_a_cluster(tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    file.write_text(dump(cluster("h100", 8)), encoding="utf-8")
    assert cluster(file, 32).devices == 32
    assert cluster(str(file), 32).device == device("h100")


def test_local_reads_what_calibrate_wrote_and_estimates_otherwise(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    estimate = local(2)
    assert estimate.device.kind == "cpu"
    assert estimate.devices == 2
    assert estimate.cores is not None
    assert 1e9 < estimate.device.peaks["fp32"] < 1e14
    clusters.local_path().parent.mkdir(parents=True)
    clusters.local_path().write_text(dump(cluster("h100", 8)), encoding="utf-8")
    assert cluster("local", 4).device == device("h100")
    assert cluster("LOCAL", 4).devices == 4
