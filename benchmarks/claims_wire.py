"""Claims on the data axes' wire: bytes that compression saves, and an all-reduce beside a parameter server."""

from __future__ import annotations

from claims_ranks import Claim
from compress import server, train

ROWS = ({"compress": "half"}, {"compress": "topk:0.1"}, {"compress": "powersgd:4"})


def compression(quick: bool) -> list[Claim]:
    """Bytes a step and the loss on held-out samples, beside none, on dp=2."""
    steps = 5 if quick else 200
    none = train({"compress": "none"}, steps, 0)
    claims = []
    for row in ROWS[:1] if quick else ROWS:
        found = train(row, steps, 0)
        saved = 1 - found["bytes"] / none["bytes"]
        worse = found["held_out"] - none["held_out"]
        claims.append(
            Claim(
                claim=f"bytes saved on the wire, compress={row['compress']}",
                published="30%",
                measured=f"{saved:.0%}; held-out loss after {steps} steps {found['held_out']:.3f} ({worse:+.3f})",
                verdict="as published or more" if saved >= 0.3 else "less",
            )
        )
    return claims


def parameter_server(quick: bool) -> list[Claim]:
    """Time of the exchange and the update: the share of a server's that an all-reduce takes."""
    claims = []
    for ranks in (2,) if quick else (2, 4):
        rows = {(row["transport"], row["mode"]): row for row in server(ranks, 5 if quick else 40)}
        for transport in {name: None for name, _ in rows}:
            ours, theirs = (rows[transport, mode] for mode in ("all-reduce", "server"))
            share = ours["exchange_s"] / theirs["exchange_s"]
            moved = 1 - ours["bytes"] / theirs["bytes"]
            claims.append(
                Claim(
                    claim=f"all-reduce against a parameter server, {ranks} ranks, transport={transport}",
                    published="50-70% of its time",
                    measured=f"{share:.0%} of the time of exchange and update ({ours['exchange_s'] * 1e3:.1f} against "
                    f"{theirs['exchange_s'] * 1e3:.1f} ms), {moved:.0%} fewer bytes on the busiest rank",
                    verdict="as published" if 0.5 <= share <= 0.7 else "gains more" if share < 0.5 else "gains less",
                )
            )
    return claims
