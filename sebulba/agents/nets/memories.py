"""Memories that take all rows of a trajectory at once: a linear recurrence, and attention."""

from __future__ import annotations

import functools
import math

import flax.linen as nn
import jax
import jax.numpy as jnp

from sebulba.types import PyTree

WINDOW = 64
"""Rows before the current one that a GTrXL sees."""

_Complex = tuple[jax.Array, jax.Array]


class LRU(nn.Module):
    """A block of the Linear Recurrent Unit (Orvieto et al. 2023, arXiv 2303.06349, section 3).

    Layer normalisation, ``x_t = lambda * x_{t-1} + gamma * B u_t``, ``y_t = Re(C x_t) + D u_t``, a
    gated linear unit, and a skip connection around all of these.
    """

    size: int

    @nn.compact
    def __call__(
        self, state: _Complex, features: jax.Array, is_first: jax.Array, final: PyTree
    ) -> tuple[PyTree, tuple[jax.Array, PyTree]]:
        """Run over ``features [T, B, F]``, as ``Core``; the state is two leaves ``[B, size]``."""
        embed, norm, gated = nn.Dense(self.size), nn.LayerNorm(), nn.Dense(2 * self.size)
        read_in, read_out = nn.Dense(2 * self.size, False), nn.Dense(self.size, False)
        skip = self.param("skip", nn.initializers.normal(1.0), (self.size,))[None, None]
        decay, gamma = self._ring()

        def given(u: jax.Array) -> _Complex:
            real, imaginary = jnp.split(read_in(norm(u)), 2, axis=-1)
            return gamma * real, gamma * imaginary

        def block(u: jax.Array, states: PyTree) -> jax.Array:
            y = read_out(jnp.concatenate(states, axis=-1)) + skip * norm(u)
            linear, gate = jnp.split(gated(nn.gelu(y)), 2, axis=-1)
            return u + linear * nn.sigmoid(gate)

        u, u_final = jax.tree.map(embed, (features, final))
        state = jax.tree.map(lambda x: x[None], state)
        states = _recurrence(decay, given(u), state, is_first)
        before = jax.tree.map(lambda x, rows: jnp.concatenate([x, rows[:-1]]), state, states)
        of_final = jax.tree.map(lambda u: block(u, _plus(_times(decay, before), given(u))), u_final)
        return jax.tree.map(lambda x: x[-1], states), (block(u, states), of_final)

    def _ring(self) -> tuple[_Complex, jax.Array]:
        """Return ``lambda = exp(-exp(nu) + i exp(theta))`` and ``gamma``.

        Before training, lambda is uniform on a ring of radii 0.9 to 0.999 (lemma 3.2), and gamma is
        the root of ``1 - |lambda|^2`` (section 3.4).
        """
        uniform = functools.partial(jax.random.uniform, shape=(self.size,))
        square = functools.partial(uniform, minval=0.9**2, maxval=0.999**2)
        phase = functools.partial(uniform, minval=1e-3, maxval=2 * math.pi)
        nu = self.param("nu", lambda key: jnp.log(-0.5 * jnp.log(square(key))))
        theta = self.param("theta", lambda key: jnp.log(phase(key)))
        radius, angle = jnp.exp(-jnp.exp(nu)), jnp.exp(theta)[None, None]
        gamma = self.param("gamma", lambda key: 0.5 * jnp.log(1 - radius**2))
        radius, gamma = radius[None, None], jnp.exp(gamma)[None, None]
        return (radius * jnp.cos(angle), radius * jnp.sin(angle)), gamma


def _recurrence(decay: _Complex, given: _Complex, state: _Complex, is_first: jax.Array) -> _Complex:
    """Return ``x_t = decay * x_{t-1} + given_t`` of all rows, ``[T, B, size]``.

    ``x_{-1}`` is ``state [1, B, size]``, and ``x_{t-1}`` is zero where ``is_first [T, B]``.
    """

    def both(first: PyTree, second: PyTree) -> PyTree:
        return _times(second[0], first[0]), _plus(_times(second[0], first[1]), second[1])

    kept = jax.tree.map(lambda x: x * (1.0 - is_first[..., None]), decay)
    of_state, of_rows = jax.lax.associative_scan(both, (kept, given))
    return _plus(_times(of_state, state), of_rows)


def _times(x: _Complex, y: _Complex) -> _Complex:
    return x[0] * y[0] - x[1] * y[1], x[0] * y[1] + x[1] * y[0]


def _plus(x: _Complex, y: _Complex) -> _Complex:
    return x[0] + y[0], x[1] + y[1]


class GTrXL(nn.Module):
    """A block of the gated transformer with a memory (Parisotto et al. 2019, arXiv 1910.06764).

    Attention to rows of the episode, then two layers; each after a norm, before a gate (section 3).
    """

    size: int

    @nn.compact
    def __call__(
        self, state: PyTree, features: jax.Array, is_first: jax.Array, final: PyTree
    ) -> tuple[PyTree, tuple[jax.Array, PyTree]]:
        """Run over ``features [T, B, F]``, as ``Core``.

        The state is the last M inputs, ``[B, M, size]``, the newest last, and how many of them are
        of this episode, ``[B]``; the others are zeros. Each row sees M rows before it and itself.
        """
        (remembered, count), embed, norm = state, nn.Dense(self.size), nn.LayerNorm()
        rows, window = embed(features), remembered.shape[1]
        past = jnp.concatenate([jnp.moveaxis(remembered, 1, 0), rows])
        episode = jnp.cumsum(is_first.astype(jnp.int32), axis=0)
        is_known = jnp.arange(window)[:, None] >= window - count[None]
        episodes = jnp.concatenate([jnp.where(is_known, 0, -1), episode])
        attention, wide, narrow = _Attention(), nn.Dense(4 * self.size), nn.Dense(self.size)
        gates = _Gate(), _Gate()

        def block(x: jax.Array, episode: jax.Array) -> jax.Array:
            is_seen = episode[..., None] == episodes[:-1].T[None]
            x = gates[0](x, nn.relu(attention(x, past[:-1], is_seen)))
            return gates[1](x, nn.relu(narrow(nn.relu(wide(norm(x))))))

        of_final = jax.tree.map(lambda x: block(embed(x), episode - is_first), final)
        is_known = episodes[-window:] == episode[-1:]
        newest = jnp.where(is_known[..., None], past[-window:], 0.0)
        state = jnp.moveaxis(newest, 0, 1), jnp.sum(is_known, axis=0, dtype=jnp.float32)
        return state, (block(rows, episode), of_final)


class _Attention(nn.Module):
    """Attention of rows to the M rows before them and to themselves, by heads.

    Logits are those of relative positions (Dai et al. 2019, arXiv 1901.02860, section 3.3).
    """

    @nn.compact
    def __call__(self, x: jax.Array, past: jax.Array, is_seen: jax.Array) -> jax.Array:
        """Return ``[T, B, size]`` for ``x [T, B, size]``.

        Row t sees itself, and those of ``past[t : t + M]`` of ``[M + T - 1, B, size]`` that
        ``is_seen [T, B, M + T - 1]`` leaves.
        """
        (length, _, size), norm, zeros = x.shape, nn.LayerNorm(), nn.initializers.zeros
        window, num_heads = len(past) + 1 - length, math.gcd(size, 4)
        layers = {name: nn.Dense(size, False, name=name) for name in ("q", "k", "v", "r", "out")}

        def heads(name: str, given: jax.Array) -> jax.Array:
            return layers[name](given).reshape(*given.shape[:-1], num_heads, -1)

        past, own, near = norm(past), norm(x), jnp.tri(length, len(past), window - 1, dtype=bool)
        is_seen = is_seen & (near & ~jnp.tri(length, len(past), -1, dtype=bool))[:, None]
        of_content, of_distance = (
            heads("q", own) + self.param(name, zeros, (size,)).reshape(1, 1, num_heads, -1)
            for name in ("content", "distance")
        )
        rate = 10000.0 ** -jnp.linspace(0.0, 1.0, (size + 1) // 2, endpoint=False)
        angle = jnp.arange(window + 1)[:, None] * rate[None]
        sinusoids = jnp.concatenate([jnp.sin(angle), jnp.cos(angle)], axis=-1)
        far = jnp.einsum("tbhk,mhk->tbhm", of_distance, heads("r", sinusoids))
        to_past = jnp.einsum("tbhk,jbhk->tbhj", of_content, heads("k", past))
        to_past = jnp.where(is_seen[:, :, None], to_past + _shifted(far[..., :0:-1]), -1e9)
        to_own = jnp.sum(of_content * heads("k", own), axis=-1, keepdims=True) + far[..., :1]
        logits = jnp.concatenate([to_past, to_own], axis=-1)
        weight = nn.softmax(logits / math.sqrt(size // num_heads))
        found = jnp.einsum("tbhj,jbhk->tbhk", weight[..., :-1], heads("v", past))
        found = found + weight[..., -1:] * heads("v", own)
        return layers["out"](found.reshape(x.shape))


def _shifted(x: jax.Array) -> jax.Array:
    """Return ``[T, B, H, M + T - 1]``, in which row t of ``x [T, B, H, M]`` begins at column t."""
    (length, *between, window), x = x.shape, jnp.moveaxis(x, 0, 2)
    x = jnp.pad(x, ((0, 0), (0, 0), (0, 0), (0, length))).reshape(*between, -1)
    x = x[..., : length * (window + length - 1)].reshape(*between, length, -1)
    return jnp.moveaxis(x, 2, 0)


class _Gate(nn.Module):
    """Gate of a GRU between ``x`` and ``y``, almost ``x`` before training (section 3.2)."""

    @nn.compact
    def __call__(self, x: jax.Array, y: jax.Array) -> jax.Array:
        """Return ``[T, B, size]`` for two of this shape."""
        bias = self.param("bias", nn.initializers.constant(2.0), x.shape[-1:])[None, None]
        of_y = nn.Dense(3 * x.shape[-1], False, name="y")(y)
        of_x = nn.Dense(2 * x.shape[-1], False, name="x")(x)
        (ry, zy, hy), (rx, zx) = jnp.split(of_y, 3, axis=-1), jnp.split(of_x, 2, axis=-1)
        z = nn.sigmoid(zy + zx - bias)
        h = jnp.tanh(hy + nn.Dense(x.shape[-1], False, name="rx")(nn.sigmoid(ry + rx) * x))
        return (1 - z) * x + z * h
