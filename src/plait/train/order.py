"""The order of the training samples: a permutation that (seed, epoch) names, computed place by place."""

from __future__ import annotations

import hashlib

import numpy as np
from numpy.typing import NDArray


def permute(places: NDArray[np.int64], size: int, seed: int, epoch: int) -> NDArray[np.int64]:
    """Where a permutation of ``range(size)`` that (seed, epoch) names sends ``places``, without an array of ``size``.

    A balanced Feistel network of 8 rounds over the next even number of bits permutes a domain of at most ``4 * size``;
    a value that falls outside ``size`` goes through again until it does not (cycle walking, Black and Rogaway, CT-RSA
    2002), which makes it a permutation of ``range(size)``. Round keys: blake2b; round function: splitmix64's mixer.
    """
    half = np.uint64(max(1, ((size - 1).bit_length() + 1) // 2))
    mask = (np.uint64(1) << half) - np.uint64(1)
    digest = hashlib.blake2b(f"plait data order {seed} {epoch}".encode(), digest_size=64).digest()
    keys = np.frombuffer(digest, "<u8").astype(np.uint64)
    out = places.astype(np.uint64)
    outside = np.arange(len(out))
    while outside.size:
        left, right = out[outside] >> half, out[outside] & mask
        for key in keys:
            left, right = right, left ^ (_mix(right + key) & mask)
        out[outside] = left << half | right
        outside = outside[out[outside] >= size]
    return out.astype(np.int64)


def _mix(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """The finaliser of splitmix64 (Steele, Lea and Flood, OOPSLA 2014); wraps modulo 2**64."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
