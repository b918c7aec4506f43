"""The order of samples: a permutation per epoch, the same for ever, whatever the batch size and wherever one starts."""

import math
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pico_train.data import order
from pico_train.data.order import permuted, sample_ids, token_positions

SIZES = [1, 2, 3, 4, 5, 10, 16, 17, 63, 64, 65, 255, 257, 1000, 4096, 4097]
MASK = 2**64 - 1


def whole(n, *, seed=0, epoch=0):
    return permuted(np.arange(n), n=n, seed=seed, epoch=epoch)


@pytest.mark.parametrize("n", SIZES)
def test_every_epoch_is_a_permutation(n):
    for epoch in range(3):
        assert sorted(whole(n, seed=7, epoch=epoch)) == list(range(n))


@given(n=st.integers(1, 5000), seed=st.integers(0, 2**63), epoch=st.integers(0, 2**40))
@settings(max_examples=40, deadline=None)
def test_permutation_of_any_size_seed_and_epoch(n, seed, epoch):
    assert np.array_equal(np.sort(whole(n, seed=seed, epoch=epoch)), np.arange(n))


def test_largest_size_stays_inside_and_apart():
    n = order.MAX_WINDOWS
    indices = np.unique(np.geomspace(1, n, 5000).astype(np.int64)) - 1
    images = permuted(indices, n=n, seed=1, epoch=2)
    assert indices[-1] == n - 1
    assert images.min() >= 0
    assert images.max() < n
    assert len(np.unique(images)) == len(indices)


def test_sizes_outside_the_range_are_no_permutation():
    for n in (0, order.MAX_WINDOWS + 1):
        with pytest.raises(AssertionError):
            permuted(np.arange(1), n=n, seed=0, epoch=0)


@pytest.mark.parametrize("n", [3, 4])
def test_all_orders_of_a_few_are_equally_likely(n):
    counts = Counter(tuple(whole(n, seed=seed)) for seed in range(3000))
    n_orders = math.factorial(n)
    expected = 3000 / n_orders
    chi_squared = sum((count - expected) ** 2 / expected for count in counts.values())
    assert len(counts) == n_orders
    assert chi_squared < 2.5 * n_orders  # 99.9 % point: 20.5 for 5 degrees of freedom (here 15), 49.7 for 23 (here 60)


def test_a_shuffle_looks_like_one():
    n = 2000
    images = whole(n, seed=3)
    assert abs(np.corrcoef(np.arange(n), images)[0, 1]) < 4 / math.sqrt(n)
    assert 0 <= (images == np.arange(n)).sum() <= 6  # fixed points: 1 on average
    rises = (np.diff(images) > 0).mean()
    assert abs(rises - 0.5) < 4 * math.sqrt(1 / 12 / n)


def test_seeds_and_epochs_give_other_orders():
    orders = {tuple(whole(100, seed=seed, epoch=epoch)) for seed in range(5) for epoch in range(5)}
    assert len(orders) == 25


def test_one_place_alone_equals_the_same_place_in_bulk():
    bulk = sample_ids(0, 70, n_windows=23, seed=4, shuffle=True)
    alone = [sample_ids(place, 1, n_windows=23, seed=4, shuffle=True)[0] for place in range(70)]
    assert bulk.tolist() == alone
    assert bulk.dtype == np.int64


def test_every_sample_once_an_epoch_across_batches_that_do_not_divide():
    n, batch = 10, 7
    stream = np.concatenate([sample_ids(step * batch, batch, n_windows=n, seed=1, shuffle=True) for step in range(10)])
    for epoch in stream.reshape(7, n):
        assert sorted(epoch) == list(range(n))


def test_resuming_in_the_middle_of_an_epoch_goes_on_there_and_then_sees_whole_epochs():
    """Ten samples, three epochs, stopped after nine: the tenth, then all ten, then all ten."""
    uninterrupted = [sample_ids(p, 1, n_windows=10, seed=42, shuffle=True)[0] for p in range(30)]
    resumed = [sample_ids(p, 1, n_windows=10, seed=42, shuffle=True)[0] for p in range(9, 30)]
    assert uninterrupted[:9] + resumed == uninterrupted
    assert set(range(10)) - set(uninterrupted[:9]) == {resumed[0]}
    assert sorted(resumed[1:11]) == sorted(resumed[11:]) == list(range(10))
    assert resumed[1:11] != resumed[11:]


def test_no_batch_size_changes_the_stream():
    """4 x 8, 8 x 4 and 32 x 1 samples are the same 32."""
    streams = [
        [sample_ids(step * size, size, n_windows=13, seed=5, shuffle=True).tolist() for step in range(32 // size)]
        for size in (4, 8, 32)
    ]
    flat = [[sample for batch in stream for sample in batch] for stream in streams]
    assert flat[0] == flat[1] == flat[2]


def test_without_shuffling_the_stored_order_comes_round():
    assert sample_ids(3, 6, n_windows=5, seed=9, shuffle=False).tolist() == [3, 4, 0, 1, 2, 3]


def test_token_positions_are_distinct_ascending_and_a_function_of_seed_and_sample():
    samples = np.array([0, 5, 2**40 - 1])
    positions = token_positions(samples, seed=3, seq_len=64, k=10)
    assert positions.shape == (3, 10)
    assert (np.diff(positions, axis=1) > 0).all()
    assert positions.min() >= 0
    assert positions.max() < 64
    assert np.array_equal(token_positions(samples[1:2], seed=3, seq_len=64, k=10), positions[1:2])
    assert not np.array_equal(token_positions(samples, seed=4, seq_len=64, k=10), positions)
    assert not np.array_equal(positions[0], positions[1])
    assert token_positions(samples, seed=3, seq_len=8, k=8).tolist() == [list(range(8))] * 3


def test_fewer_positions_are_among_more_and_all_are_used_alike():
    samples = np.arange(4000)
    few, more = (token_positions(samples, seed=0, seq_len=16, k=k) for k in (2, 5))
    assert all(set(a) <= set(b) for a, b in zip(few, more, strict=True))
    uses = np.bincount(few.ravel(), minlength=16)  # 500 each on average, standard deviation 21
    assert np.abs(uses - 500).max() < 4.5 * math.sqrt(4000 * (1 / 8) * (7 / 8))


# The order is part of every checkpoint: a change of these numbers is a new ORDER_VERSION.


def test_golden_values():
    assert order.ORDER_VERSION == 1
    assert sample_ids(0, 20, n_windows=10, seed=42, shuffle=True).tolist() == [
        *(7, 2, 4, 0, 8, 5, 6, 9, 3, 1),
        *(1, 2, 8, 0, 3, 4, 6, 7, 5, 9),
    ]
    assert permuted(np.array([0, 1, 2**40 - 1]), n=2**40, seed=3, epoch=7).tolist() == [
        401546006905,
        436281829154,
        188999409979,
    ]
    assert token_positions(np.array([0, 1, 2**39]), seed=42, seq_len=16, k=4).tolist() == [
        [0, 2, 3, 7],
        [8, 12, 14, 15],
        [5, 6, 8, 9],
    ]


def test_the_mixer_is_the_published_one():
    """The first outputs of SplitMix64 from the seed 1234567: each step adds the constant that the mixer adds too."""
    states = [(1234567 + k * 0x9E3779B97F4A7C15) & MASK for k in range(3)]
    assert order._mix(np.array(states, np.uint64)).tolist() == [
        6457827717110365317,
        3203168211198807973,
        9817491932198370423,
    ]


@pytest.mark.parametrize("n", [1, 2, 3, 10, 100, 12345])
def test_a_second_implementation_in_plain_integers_agrees(n):
    def mix(x):
        x = (x + 0x9E3779B97F4A7C15) & MASK
        x = ((x ^ x >> 30) * 0xBF58476D1CE4E5B9) & MASK
        x = ((x ^ x >> 27) * 0x94D049BB133111EB) & MASK
        return x ^ x >> 31

    def key(*words):
        state = 0
        for word in words:
            state = mix(state ^ word)
        return state

    half = next(bits for bits in range(1, 21) if 4**bits >= n)

    def once(x):
        left, right = divmod(x, 2**half)
        for number in range(8):
            left, right = right, left ^ (mix((right + key(1, 11, 3, number)) & MASK) % 2**half)
        return left * 2**half + right

    def image(x):
        x = once(x)
        while x >= n:
            x = once(x)
        return x

    indices = np.unique(np.linspace(0, n - 1, 50).astype(np.int64))
    assert permuted(indices, n=n, seed=11, epoch=3).tolist() == [image(int(x)) for x in indices]
