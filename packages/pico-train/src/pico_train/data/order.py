"""Which sample stands at which place of training: pure arithmetic, so that resuming is a matter of counting.

A sample is a window of the training tokens, known by its number. Place ``p`` of training, counted from 0 over
all epochs, lies in epoch ``p // n`` and holds sample ``permutation(n, seed, epoch)[p % n]``. The permutation
is never stored: any place is computed by itself, in the same few operations whatever ``n``. Batches,
micro-batches and ranks only slice this one sequence.

Construction. Indices below ``n`` are embedded in the numbers of ``2 h`` bits, the smallest such domain that
holds them. A balanced Feistel network permutes that domain (Luby and Rackoff, "How to construct pseudorandom
permutations from pseudorandom functions", SIAM J. Comput. 17:373, 1988); an image outside ``0 .. n - 1`` is
permuted again until it falls inside, which leaves a permutation of ``0 .. n - 1`` ("cycle walking": Black and
Rogaway, "Ciphers with arbitrary finite domains", CT-RSA 2002; fewer than four walks on average, since the
domain is smaller than 4 n). The round function is the finaliser of SplitMix64 (Steele, Lea and Flood, "Fast
splittable pseudorandom number generators", OOPSLA 2014) over a key drawn from seed, epoch and round.

No generator of numpy or torch takes part: the numbers are the same on every machine and under every version,
for ever. Whoever changes one of them raises ``ORDER_VERSION``, which every checkpoint records.
"""

import numpy as np
import numpy.typing as npt

ORDER_VERSION = 1

MAX_WINDOWS = 2**40
ROUNDS = 8

Ints = npt.NDArray[np.int64]
Words = npt.NDArray[np.uint64]

# What a hash is for is its first word, so that the uses share no value.
_SHUFFLE, _POSITIONS = 1, 2


def sample_ids(start: int, count: int, *, n_windows: int, seed: int, shuffle: bool) -> Ints:
    """The samples at places ``start .. start + count - 1`` of training, shape (count,).

    Each epoch of ``n_windows`` places holds every sample once: in an order of its own when ``shuffle``, else
    ascending.
    """
    places = np.arange(start, start + count, dtype=np.int64)
    epochs, indices = np.divmod(places, n_windows)
    return permuted(indices, n=n_windows, seed=seed, epoch=epochs) if shuffle else indices


def permuted(indices: Ints, *, n: int, seed: int, epoch: Ints | int) -> Ints:
    """``permutation(n, seed, epoch)[indices]``: ``indices`` (m,) below ``n``, ``epoch`` a number or (m,)."""
    assert 1 <= n <= MAX_WINDOWS, f"n = {n}"
    half_bits = max(1, ((n - 1).bit_length() + 1) // 2)
    epochs = np.broadcast_to(epoch, indices.shape)
    keys = np.stack([_hash(_SHUFFLE, seed, epochs, r) for r in range(ROUNDS)])  # (ROUNDS, m)
    images = _feistel(indices.astype(np.uint64), keys, half_bits)
    while (outside := np.flatnonzero(images >= n)).size:
        images[outside] = _feistel(images[outside], keys[:, outside], half_bits)
    return images.astype(np.int64)


def token_positions(sample_ids: Ints, *, seed: int, seq_len: int, k: int) -> npt.NDArray[np.int32]:
    """``k`` distinct positions below ``seq_len`` for each sample (m,), ascending, shape (m, k).

    They are those with the smallest hashes of (seed, sample, position).
    """
    assert 1 <= k <= seq_len, f"k = {k}, seq_len = {seq_len}"
    hashes = _hash(_POSITIONS, seed, sample_ids[:, None], np.arange(seq_len)[None])  # (m, seq_len)
    smallest = np.argsort(hashes, axis=1, kind="stable")[:, :k]
    return np.sort(smallest, axis=1).astype(np.int32)


def _feistel(x: Words, keys: Words, half_bits: int) -> Words:
    """Permute numbers of ``2 * half_bits`` bits, ``x`` (m,), by one round per row of ``keys`` (rounds, m)."""
    shift, mask = np.uint64(half_bits), np.uint64((1 << half_bits) - 1)
    left, right = x >> shift, x & mask
    for key in keys:
        left, right = right, left ^ (_mix(right + key) & mask)
    return (left << shift) | right


def _hash(*words: npt.ArrayLike) -> Words:
    """A 64-bit hash of non-negative integers or arrays of them, broadcast; at least one-dimensional."""
    state: Words = np.zeros(1, np.uint64)
    for word in words:
        state = _mix(state ^ np.asarray(word).astype(np.uint64))
    return state


def _mix(x: Words) -> Words:
    """One step of SplitMix64 from each state in ``x``, an array: numpy scalars would warn of the wrapping."""
    x = x + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
