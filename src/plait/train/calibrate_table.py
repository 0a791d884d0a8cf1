"""What `plait calibrate` found, as a table and as JSON values."""

from __future__ import annotations

from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Table

from plait.core.topology import Measured, Topology
from plait.planner.calibrate import peaks


def summary(found: Topology) -> dict[str, object]:
    """The figures that say most, as JSON values."""
    measured = found.measured
    return {
        "name": found.name,
        "device": found.device.name,
        "devices": found.devices,
        "cores": found.cores,
        "memory_bytes": found.device.memory,
        "peak_flops": dict(found.device.peaks),
        "best_flops": peaks(measured.gemm),
        "bandwidth": measured.bandwidth,
        "optimizer_bandwidth": measured.optimizer_bandwidth,
        "launch_s": measured.launch,
        "tiers": [
            {"name": t.name, "size": t.size, "bandwidth": t.bandwidth, "latency_s": t.latency} for t in found.tiers
        ],
        "shares": [{"ranks": share.ranks, "best_flops": peaks(share.measured.gemm)} for share in found.shares],
        "points": {"gemm": len(measured.gemm), "attention": len(measured.attention), "comm": len(measured.comm)},
        "busy": measured.busy,
        "spread": measured.spread,
    }


def show(found: Topology, target: Path, console: Console) -> None:
    """A table of what a rank gets, by number of ranks, and the links."""
    rows = [(share.ranks, share.measured) for share in found.shares] or [(found.devices, found.measured)]
    precisions = list(peaks(rows[0][1].gemm))
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, title_justify="left", title_style="bold")
    table.title = f"{found.device.name}: what one rank gets"
    rates = [f"{precision}\nGFLOP/s" for precision in precisions]
    for column in ("ranks", *rates, "memory\nGB/s", "optimizer\nGB/s", "a launch\nus", "a meeting\nms"):
        table.add_column(column, justify="right")
    for ranks, measured in rows:
        best = peaks(measured.gemm)
        products = [f"{best.get(precision, 0.0) / 1e9:,.0f}" for precision in precisions]
        speeds = [f"{(value or 0) / 1e9:,.1f}" for value in (measured.bandwidth, measured.optimizer_bandwidth)]
        table.add_row(str(ranks), *products, *speeds, f"{(measured.launch or 0) * 1e6:.1f}", _meetings(measured))
    console.print(table)
    for tier in found.tiers:
        console.print(f"{tier.name}: {tier.bandwidth / 1e9:,.2f} GB/s a rank, {tier.latency * 1e6:,.1f} us a message")
    console.print(f"written: {target}", soft_wrap=True)


def _meetings(measured: Measured) -> str:
    """What ranks lose where they meet: the least and the most."""
    lost = sorted(point.seconds * 1e3 for point in measured.meetings)
    return f"{lost[0]:.1f} to {lost[-1]:.1f}" if lost else ""
