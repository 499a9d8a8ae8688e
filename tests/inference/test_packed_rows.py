"""Rows of few arrays, and small computations of one kernel."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sebulba.inference.packed_rows import MOST_PACKED_ELEMENTS, RowPacking
from sebulba.support.one_kernel import MOST_ELEMENTS, MOST_REDUCED_ELEMENTS, one_kernel

B = 3


def new_row(rng: np.random.Generator) -> dict:
    large = MOST_PACKED_ELEMENTS // B + 1
    return {
        "image": rng.integers(0, 255, (B, large), np.uint8),
        "obs": {"a": rng.normal(size=(B, 2, 5)).astype(np.float32), "b": np.arange(B, dtype="i4")},
        "none": (),
        "ends": rng.random(B) < 0.5,
        "reward": rng.normal(size=B).astype(np.float32),
        "byte": np.arange(4 * B, dtype=np.uint8).reshape(B, 4),
    }


def test_packed_rows_come_apart_as_they_were():
    row = new_row(np.random.default_rng(0))
    packing = RowPacking(row)
    packed = jax.jit(packing.pack)(row)
    assert len(packed.joined) == 4, "one array for each dtype"
    assert [leaf.shape for leaf in packed.loose] == [row["image"].shape]
    jax.tree.map(np.testing.assert_array_equal, packing.unpack(packed), row)
    assert jax.tree.map(lambda x: x.dtype, packing.unpack(packed)) == jax.tree.map(
        lambda x: x.dtype, row
    )


def test_packed_rows_may_be_stacked():
    rng = np.random.default_rng(1)
    rows = [new_row(rng) for _ in range(7)]
    packing = RowPacking(rows[0])
    packed = jax.tree.map(lambda *x: np.stack(x), *map(jax.jit(packing.pack), rows))
    expected = jax.tree.map(lambda *x: np.stack(x), *rows)
    jax.tree.map(np.testing.assert_array_equal, packing.unpack(packed), expected)


def sample(key_data: jax.Array, logits: jax.Array) -> tuple[jax.Array, jax.Array]:
    key = jax.random.wrap_key_data(key_data)
    return jax.random.categorical(key, logits), jax.nn.log_softmax(logits).sum(axis=0)


def test_one_kernel_computes_what_the_function_does():
    data = jax.random.key_data(jax.random.key(5))
    logits = jnp.linspace(-1.0, 2.0, 28).reshape(7, 4)
    marked = jax.jit(one_kernel(sample, reduces=True))
    for one, other in zip(marked(data, logits), jax.jit(sample)(data, logits), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-6)
    text = marked.lower(data, logits).compile().as_text()
    assert 'xla_cpu_small_call="true"' in text


def test_large_arrays_stay_with_many_kernels():
    text = jax.jit(one_kernel(lambda x: jnp.sin(x) + 1)).lower(jnp.zeros(MOST_ELEMENTS + 1))
    assert "xla_cpu_small_call" not in text.as_text()


@pytest.mark.parametrize("shape", [(MOST_ELEMENTS // n, n) for n in (1, 4, 1024)])
@pytest.mark.parametrize("dtype", [np.float32, np.uint8])
def test_one_kernel_can_be_compiled_up_to_its_largest_arrays(shape, dtype):
    def move(x: jax.Array) -> tuple[jax.Array, ...]:
        rows = jnp.arange(len(x))[::-1]
        joined = jnp.concatenate([x, x], axis=1)
        return jnp.clip(x, 1, 2), x[rows], joined.astype(jnp.float32) * 3

    moved = jax.jit(one_kernel(move))
    x = jnp.arange(MOST_ELEMENTS).reshape(shape).astype(dtype)
    assert "xla_cpu_small_call" in moved.lower(x).as_text()
    for one, other in zip(moved(x), move(x), strict=True):
        np.testing.assert_allclose(one, other)


@pytest.mark.parametrize("shape", [(MOST_REDUCED_ELEMENTS // n, n) for n in (1, 2, 18, 1024)])
def test_one_kernel_can_be_compiled_up_to_its_largest_reduction(shape):
    x = jnp.ones(shape)
    reduce = jax.jit(one_kernel(lambda x: (jax.nn.log_softmax(x), x.sum(0), x.max()), reduces=True))
    assert "xla_cpu_small_call" in reduce.lower(x).as_text()
    np.testing.assert_allclose(reduce(x)[1], shape[0])
