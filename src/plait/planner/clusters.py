"""Clusters by name: data-sheet figures of devices and links, a cluster file, or the machine this runs on (``local``).

Peaks are dense FLOP/s. Memory is what the driver reports (``nvidia-smi``), which is less than the printed size where
the driver keeps some. Bandwidth of links is one direction of one device; between nodes it is the device's share of the
network cards. Latency is NCCL's own constants for one small message (src/graph/tuning.cc, LL protocol: base 6.6 us,
plus 0.6 us over NVLink or 2.7 us over the network), rounded up for what a host adds.
"""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from plait.core.cache import cache_folder
from plait.core.cluster_file import load
from plait.core.errors import ConfigError
from plait.core.fields import nearest_names
from plait.core.topology import Device, Tier, Topology
from plait.planner.host import estimate

NETWORK_DEVICES = 1 << 20
"""Devices that the outermost tier of a preset can hold."""
_SIZE = re.compile(r"\d+gb")
_MIB = 1024.0**2
_GIB = 1024.0**3
_ML = "stas00/ml-engineering@744d01e, compute/accelerator and network READMEs (vendor tables)"
_TPU = "jax-ml/scaling-book, tpus.md"


@dataclass(frozen=True, kw_only=True)
class _Preset:
    """A device and the node it comes in: ``domain`` devices on fast links; ``intra`` and ``inter`` in bytes/s."""

    device: Device
    domain: int
    intra: float
    inter: float
    fast: str = "nvlink"
    slow: str = "network"
    near: float = 7.5e-6
    far: float = 10e-6


def _gpu(
    name: str,
    memory: float,
    bandwidth: float,
    *,
    bf16: float,
    fp32: float,
    fp8: float = 0.0,
    fp4: float = 0.0,
    fp16: float = 0.0,
    tensor_fp32: bool = True,
    source: str = _ML,
    kind: str = "gpu",
) -> Device:
    """``memory`` in bytes, ``bandwidth`` in TB/s, rates in TFLOP/s; ``fp16`` 0: at the rate of bf16. 0 elsewhere: the
    device has no such units. tf32, which torch uses for fp32 products only when told to, has half the rate of bf16 on
    NVIDIA's."""
    tf32 = bf16 / 2 if tensor_fp32 else 0.0
    rates = {"fp32": fp32, "tf32": tf32, "bf16": bf16, "fp16": fp16 or bf16, "fp8": fp8, "fp4": fp4}
    peaks = {precision: rate * 1e12 for precision, rate in rates.items() if rate}
    return Device(name=name, memory=memory, peaks=peaks, bandwidth=bandwidth * 1e12, kind=kind, source=source)


def _tpu(name: str, memory: float, bandwidth: float, bf16: float) -> Device:
    # fp32 products are made of six bf16 ones.
    return _gpu(name, memory * _GIB, bandwidth, bf16=bf16, fp32=bf16 / 6, tensor_fp32=False, source=_TPU, kind="tpu")


def _nvidia(device: Device, intra: float, nic: float, domain: int = 8) -> _Preset:
    """``intra`` in GB/s a direction, ``nic`` in Gbit/s a device."""
    return _Preset(device=device, domain=domain, intra=intra * 1e9, inter=nic * 1e9 / 8)


def _amd(device: Device, intra: float, nic: float) -> _Preset:
    return _Preset(device=device, domain=8, intra=intra * 1e9, inter=nic * 1e9 / 8, fast="xgmi")


def _pcie(device: Device, intra: float, nic: float) -> _Preset:
    """Cards of a node that meet over its PCIe; ``intra`` in GB/s a direction, ``nic`` in Gbit/s a device."""
    return _Preset(device=device, domain=8, intra=intra * 1e9, inter=nic * 1e9 / 8, fast="pcie")


def _torus(device: Device, link: float, links: int, domain: int) -> _Preset:
    """``links`` of ``link`` GB/s each a direction; beyond the ``domain`` chips of a pod: the data centre's network."""
    inter = 6.25e9  # scaling-book: 25 GB/s a host of 4 chips
    return _Preset(
        device=device, domain=domain, intra=link * links * 1e9, inter=inter, fast="ici", slow="dcn", near=1e-6
    )


_PRESETS = {
    "a100-80g": _nvidia(_gpu("A100-80GB-SXM", 81920 * _MIB, 2.039, bf16=312, fp32=19.5), 300, 200),
    "a100-40g": _nvidia(_gpu("A100-40GB-SXM", 40960 * _MIB, 1.555, bf16=312, fp32=19.5), 300, 200),
    "a800": _nvidia(_gpu("A800-80GB", 81920 * _MIB, 2.039, bf16=312, fp32=19.5), 200, 200),
    "h100": _nvidia(_gpu("H100-80GB-SXM", 81559 * _MIB, 3.35, bf16=989, fp32=67, fp8=1979), 450, 400),
    # torchtitan's benchmarks: Meta Grand Teton, HBM2e at 500 W. The rate is that of the 80 GB part, its ceiling.
    "h100-96g": _nvidia(
        _gpu(
            "H100-96GB-HBM2e-500W",
            97871 * _MIB,
            2.4,
            bf16=989,
            fp32=67,
            fp8=1979,
            source="pytorch/torchtitan benchmarks",
        ),
        450,
        400,
    ),
    "h800": _nvidia(
        _gpu(
            "H800-80GB", 81559 * _MIB, 3.35, bf16=989, fp32=67, fp8=1979, source="DeepSeek-V3 (arXiv 2412.19437) 3.2.2"
        ),
        200,
        400,
    ),
    "h200": _nvidia(_gpu("H200-141GB-SXM", 143771 * _MIB, 4.8, bf16=989, fp32=67, fp8=1979), 450, 400),
    # Four superchips a node, each pair on 150 GB/s; a network port of 200 Gbit/s each (CSCS Alps, JUPITER).
    "gh200": _nvidia(_gpu("GH200-96GB", 97871 * _MIB, 4.0, bf16=989, fp32=67, fp8=1979), 450, 200, domain=4),
    "b200": _nvidia(_gpu("B200", 183359 * _MIB, 8.0, bf16=2250, fp32=75, fp8=4500, fp4=9000), 900, 400),
    "gb200": _nvidia(_gpu("GB200", 189471 * _MIB, 8.0, bf16=2500, fp32=80, fp8=5000, fp4=10000), 900, 400, domain=72),
    "b300": _nvidia(_gpu("B300", 275040 * _MIB, 8.0, bf16=2250, fp32=75, fp8=4500, fp4=12600), 900, 800),
    "gb300": _nvidia(_gpu("GB300", 284208 * _MIB, 8.0, bf16=2500, fp32=80, fp8=5000, fp4=15000), 900, 800, domain=72),
    "v100-32g": _nvidia(_gpu("V100-32GB-SXM", 32510 * _MIB, 0.9, bf16=0, fp16=125, fp32=15.7), 150, 100),
    "a100-40g-pcie": _pcie(_gpu("A100-40GB-PCIe", 40960 * _MIB, 1.555, bf16=312, fp32=19.5), 25, 100),
    "a100-80g-pcie": _pcie(_gpu("A100-80GB-PCIe", 81920 * _MIB, 1.935, bf16=312, fp32=19.5), 25, 100),
    "h100-pcie": _pcie(_gpu("H100-80GB-PCIe", 81559 * _MIB, 2.0, bf16=756, fp32=51, fp8=1513), 50, 200),
    "l40s": _pcie(_gpu("L40S-48GB", 46068 * _MIB, 0.864, bf16=362, fp32=91.6, fp8=733), 25, 100),
    "h20": _nvidia(_gpu("H20-96GB-SXM", 97871 * _MIB, 4.0, bf16=148, fp32=44, fp8=296), 450, 400),
    # Half of a module, which is what a rank has; Frontier's node of eight, where the thinnest link binds a ring.
    "mi250x": _amd(_gpu("MI250X", 64 * _GIB, 1.6, bf16=191.5, fp32=47.9, tensor_fp32=False, source="AMD"), 50, 100),
    "mi300x": _amd(_gpu("MI300X", 192 * _GIB, 5.3, bf16=1307, fp32=163.4, tensor_fp32=False, fp8=2610), 448, 400),
    "mi325x": _amd(_gpu("MI325X", 256 * _GIB, 6.0, bf16=1300, fp32=163.4, tensor_fp32=False, fp8=2610), 448, 400),
    "mi355x": _amd(
        _gpu("MI355X", 288 * _GIB, 8.0, bf16=2500, fp32=157.3, tensor_fp32=False, fp8=5000, fp4=10000), 535.5, 400
    ),
    "tpu-v4": _torus(_tpu("TPU-v4", 32, 1.2, 275), 45, 6, 4096),
    "tpu-v5e": _torus(_tpu("TPU-v5e", 16, 0.81, 197), 45, 4, 256),
    "tpu-v5p": _torus(_tpu("TPU-v5p", 95, 2.8, 459), 90, 6, 8960),
    "tpu-v6e": _torus(_tpu("TPU-v6e", 32, 1.6, 920), 90, 4, 256),
}
_ALIASES = {
    "a100": "a100-80g",
    "a100-sxm": "a100-80g",
    "a800-80g": "a800",
    "a100-pcie": "a100-80g-pcie",
    "v100": "v100-32g",
    "v100-sxm": "v100-32g",
    "h100-80g": "h100",
    "h100-sxm": "h100",
    "h200-141g": "h200",
    "h800-80g": "h800",
    "gh200-96g": "gh200",
    "b200-180g": "b200",
    "b300-288g": "b300",
}


def names() -> tuple[str, ...]:
    """The presets, ``local`` last."""
    return (*_PRESETS, "local")


def presets() -> dict[str, Device]:
    """Preset -> its device."""
    return {name: preset.device for name, preset in _PRESETS.items()}


def cluster(name_or_path: str | Path, devices: int) -> Topology:
    """The cluster called so, with ``devices`` of its devices.

    A preset, ``local`` (what `plait calibrate` wrote for this machine, else a quick estimate), or the path of a cluster
    file. ConfigError names the nearest presets, or what is wrong in the file.
    """
    if devices < 1:
        raise ConfigError(f"cluster {name_or_path}: devices={devices}: at least 1")
    text = str(name_or_path)
    name = _ALIASES.get(text.lower(), text.lower())
    if name == "local":
        return local(devices)
    if name in _PRESETS:
        return _from_preset(name, _PRESETS[name], devices)
    path = Path(name_or_path)
    if path.suffix == ".toml" or path.is_file() or os.sep in text:
        return load(path).with_devices(devices)
    raise ConfigError(f"cluster {text!r} is neither a preset nor a file; {nearest_names(name, names())}")


def device(name: str) -> Device:
    """The device of a preset, or one by the name that published measurements give it (``A100-80GB-SXM``)."""
    found = {preset.device.name: preset.device for preset in _PRESETS.values()}
    by_word = {_plain(key): each for key, each in found.items()}
    preset = _PRESETS.get(_ALIASES.get(name.lower(), name.lower()))
    if preset is not None:
        return preset.device
    word = _plain(name)
    if word in by_word:
        return by_word[word]
    if (alike := _by_words(name, list(found.values()))) is not None:
        return alike
    raise ConfigError(f"device {name!r} is unknown; {nearest_names(name, [*_PRESETS, *found])}")


def local(devices: int) -> Topology:
    """This machine: its cluster file where `plait calibrate` has written one, else a quick estimate of its cores."""
    path = local_path()
    return load(path).with_devices(devices) if path.is_file() else estimate(devices)


def local_path() -> Path:
    """Where `plait calibrate` puts what it found for this machine, by host name: a cache folder may be shared."""
    host = re.sub(r"[^A-Za-z0-9._-]", "_", socket.gethostname()) or "localhost"
    return cache_folder() / f"cluster-{host}.toml"


def _by_words(name: str, devices: Sequence[Device]) -> Device | None:
    """The device whose words ``name`` has, in any order: ``V100-SXM2-32GB``, ``NVIDIA H100 PCIe``. Without a size the
    first; without PCIe none that has it."""
    said = _words(name)
    for one in devices:
        words = _words(one.name)
        model = {word for word in words if word not in ("sxm", "pcie") and not _SIZE.fullmatch(word)}
        sizes = {word for word in said if _SIZE.fullmatch(word)}
        if model <= said and (not sizes or sizes & words) and ("pcie" in said) == ("pcie" in words):
            return one
    return None


def _words(name: str) -> set[str]:
    return {"sxm" if word[:3] == "sxm" else word for word in re.findall("[a-z0-9]+", name.lower())}


def _plain(name: str) -> str:
    """``A100-80GB SXM`` and ``a100-80gb-sxm`` are one device."""
    return re.sub(r"[^a-z0-9]", "", name.lower())


def _from_preset(name: str, preset: _Preset, devices: int) -> Topology:
    source = preset.device.source
    near = Tier(name=preset.fast, size=preset.domain, bandwidth=preset.intra, latency=preset.near, source=source)
    reach = -(-max(NETWORK_DEVICES, devices) // preset.domain) * preset.domain
    far = Tier(name=preset.slow, size=reach, bandwidth=preset.inter, latency=preset.far, source=source)
    return Topology(name=name, device=preset.device, devices=devices, tiers=(near, far), source=source)
