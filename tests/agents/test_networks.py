"""Networks: what each space becomes, and what the recurrent core remembers."""

from __future__ import annotations

import dataclasses
from typing import Any

import flax.linen as nn
import gymnasium
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import jaxprs_in_params

from sebulba.agents.configs import ImpalaConfig, PPOConfig, TorsoConfig
from sebulba.agents.impala import Impala
from sebulba.agents.nets.actor_and_critic import Actor, Critic
from sebulba.agents.nets.encoder import Encoded, ObservationEncoder
from sebulba.agents.nets.torso import Torso, orthogonal, zero_core
from sebulba.agents.ppo import PPO
from sebulba.errors import UsageError
from sebulba.support.files import dataclass_from_json
from sebulba.types import EnvSpec, RunSpec
from tests.support.agent_driver import quick_state

spaces = gymnasium.spaces
TWO = spaces.Discrete(2, dtype=np.int32)
SMALL = TorsoConfig(hidden_sizes=(5,), image_features=6, resnet_channels=(2, 3))


def encode(
    space: Any, obs: Any, frame_stack: int = 0, channels_first: Any = None, **options: Any
) -> Any:
    """Encode one observation; returns its vector and its images."""
    spec = EnvSpec(space, TWO, frame_stack, channels_first=channels_first)
    encoder = ObservationEncoder(spec, TorsoConfig(**options))
    one = {k: np.asarray(v)[None] for k, v in obs.items()} if isinstance(obs, dict) else obs[None]
    encoded = encoder(one, num_leading=1)
    return np.asarray(encoded.vector)[0], [np.asarray(image)[0] for image in encoded.images]


def test_encodes_every_space() -> None:
    space = spaces.Dict(
        b=spaces.Discrete(3, start=4),
        a=spaces.Box(-1, 1, (2, 2)),
        d=spaces.MultiDiscrete([2, 3], start=[1, 0]),
        c=spaces.MultiBinary(3),
    )
    obs = {"b": 5, "a": [[0.1, 0.2], [0.3, 0.4]], "d": [2, 0], "c": np.int8([1, 0, 1])}
    vector, images = encode(space, obs)
    assert images == []
    expected = [0.1, 0.2, 0.3, 0.4] + [0, 1, 0] + [1, 0, 1] + [0, 1] + [1, 0, 0]
    np.testing.assert_allclose(vector, expected, rtol=1e-6)


def test_kernels_are_those_of_flax_and_a_shape_is_traced_once(monkeypatch) -> None:
    key, shape = jax.random.key(3), (3, 7)
    ours, theirs = orthogonal(0.7), nn.initializers.orthogonal(0.7)
    np.testing.assert_array_equal(ours(key, shape, jnp.float32), theirs(key, shape, jnp.float32))
    traced = []

    def make(scale):
        return lambda key, shape, dtype: traced.append(shape) or jnp.zeros(shape, dtype)

    monkeypatch.setattr(nn.initializers, "orthogonal", make)
    for _ in range(3):  # a scale that nothing else has
        found = jax.eval_shape(lambda: orthogonal(0.123)(key, shape, jnp.float32))
        assert found.shape == shape
    assert traced == [shape]


@pytest.mark.slow
def test_the_kernels_of_an_actor_and_a_critic_are_those_of_the_option() -> None:
    rows = Encoded(jnp.zeros((1, 100)), ())
    for kernels in ("orthogonal", "lecun_normal"):
        torso = TorsoConfig(hidden_sizes=(400,), initial_kernels=kernels)
        actor = Actor(torso, 200).init(jax.random.key(1), rows)["params"]
        critic = Critic(torso).init(jax.random.key(2), rows, jnp.zeros((1, 0)))["params"]
        hidden = actor["torso"]["MLP_0"]["Dense_0"]["kernel"], critic["mlp"]["Dense_0"]["kernel"]
        for kernel in hidden:
            square = kernel @ kernel.T  # of inputs by units
            is_orthogonal = np.allclose(square, 2 * np.eye(100), atol=1e-4)
            assert is_orthogonal == (kernels == "orthogonal")
        std = {"orthogonal": 0.01 / 20, "lecun_normal": 1 / 20}[kernels]
        np.testing.assert_allclose(jnp.std(actor["head"]["kernel"]), std, rtol=0.02)
        norm = jnp.linalg.norm(critic["head"]["kernel"])
        np.testing.assert_allclose(norm, 1.0, rtol=1e-5 if kernels == "orthogonal" else 0.15)


def test_images_become_channels_last_floats() -> None:
    frames = np.arange(4 * 6 * 5, dtype=np.uint8).reshape(4, 6, 5)
    _, (image,) = encode(spaces.Box(0, 255, (4, 6, 5), np.uint8), frames, frame_stack=4)
    np.testing.assert_allclose(image, np.moveaxis(frames, 0, -1) / 255, rtol=1e-6)
    _, (image,) = encode(spaces.Box(0, 255, (6, 5, 3), np.uint8), frames.reshape(8, 5, 3)[:6])
    assert image.shape == (6, 5, 3)
    _, (image,) = encode(spaces.Box(0, 255, (6, 5), np.uint8), frames[0])
    assert image.shape == (6, 5, 1)


@pytest.mark.parametrize(
    ("channels_first", "shape"), [(None, (4, 5, 26)), (True, (5, 26, 4)), (False, (4, 5, 26))]
)
def test_the_spec_says_where_channels_are(channels_first: bool | None, shape: Any) -> None:
    obs = np.zeros((4, 5, 26), np.float32)
    _, (image,) = encode(spaces.Box(0, 1, obs.shape), obs, channels_first=channels_first)
    assert image.shape == shape


@pytest.mark.parametrize("dtype", [np.uint8, np.float32])
@pytest.mark.parametrize("shape", [(4, 5, 26), (6, 7, 10), (7, 8, 9), (10, 10, 4), (84, 84, 3)])
def test_maps_and_pictures_with_channels_last_stay_as_they_are(shape: Any, dtype: Any) -> None:
    obs = np.random.default_rng(0).integers(0, 2, shape).astype(dtype)
    _, (image,) = encode(spaces.Box(0, 1, shape, dtype), obs)
    scale = 1 / 255 if dtype == np.uint8 else 1
    np.testing.assert_allclose(image, obs * scale, rtol=1e-6)


def test_a_stack_of_frames_of_pixels_is_told_by_its_sizes() -> None:
    obs = np.random.default_rng(0).integers(0, 256, (4, 84, 84), np.uint8)
    _, (image,) = encode(spaces.Box(0, 255, obs.shape, np.uint8), obs)
    np.testing.assert_allclose(image, np.moveaxis(obs, 0, -1) / 255, rtol=1e-6)


def test_each_image_of_a_dict_has_a_layout_of_its_own() -> None:
    rng = np.random.default_rng(0)
    first, last = rng.integers(0, 256, (4, 20, 24), np.uint8), rng.integers(0, 2, (4, 5, 26))
    obs = {"first": first, "last": last.astype(np.float32)}
    pixels, cells = spaces.Box(0, 255, first.shape, np.uint8), spaces.Box(0, 1, last.shape)
    space = spaces.Dict({"first": pixels, "last": cells})
    for channels_first in (None, ("first",), ["first"]):
        _, images = encode(space, obs, channels_first=channels_first)
        assert [image.shape for image in images] == [(20, 24, 4), (4, 5, 26)]


def test_a_stack_of_colour_frames_becomes_channels() -> None:
    frames = np.random.default_rng(0).integers(0, 255, (2, 6, 5, 3), np.uint8)
    _, (image,) = encode(spaces.Box(0, 255, frames.shape, np.uint8), frames, frame_stack=2)
    np.testing.assert_allclose(image[..., :3], frames[0] / 255, rtol=1e-6)
    np.testing.assert_allclose(image[..., 3:], frames[1] / 255, rtol=1e-6)


def test_mlp_flattens_images() -> None:
    space = spaces.Box(0, 255, (2, 3, 4), np.uint8)
    vector, images = encode(space, np.full((2, 3, 4), 51, np.uint8), kind="mlp")
    assert images == []
    np.testing.assert_allclose(vector, np.full(24, 0.2), rtol=1e-6)


def test_scales_bounded_components_only() -> None:
    space = spaces.Box(np.float32([0, -np.inf, -4, -1e30]), np.float32([8, 5, 4, 1e30]))
    obs = np.float32([6, 3, -4, 7])
    scaled, _ = encode(space, obs, scale_bounded_observations=True)
    np.testing.assert_allclose(scaled, [0.5, 3, -1, 7], rtol=1e-6)
    np.testing.assert_allclose(encode(space, obs)[0], obs)


def make(space: Any, action: Any = TWO, frame_stack: int = 0, **options: Any) -> Impala:
    options = {"torso": SMALL} | options
    return Impala(EnvSpec(space, action, frame_stack), ImpalaConfig(**options))


def test_mixed_dict_goes_through_cnn_and_mlp() -> None:
    agent = make(
        spaces.Dict(pixels=spaces.Box(0, 255, (9, 8, 3), np.uint8), x=spaces.Box(-1, 1, (4,)))
    )
    networks = jax.eval_shape(agent.new_networks, jax.random.key(0))
    assert networks["policy"]["kernel"].shape == (6 + 5, 2)


@pytest.mark.parametrize(("pixels", "conv"), [(84, (8, 8, 4, 32)), (21, (3, 3, 4, 2))])
def test_auto_takes_the_network_that_fits(pixels: int, conv: tuple[int, ...]) -> None:
    agent = make(spaces.Box(0, 255, (4, pixels, pixels), np.uint8), frame_stack=4)
    networks = jax.eval_shape(agent.new_networks, jax.random.key(0))
    shapes = [leaf.shape for leaf in jax.tree.leaves(networks)]
    assert conv in shapes


@pytest.mark.parametrize(
    ("shape", "conv"),
    [((7, 7, 3), (3, 3, 3, 16)), ((16, 16, 4), (3, 3, 4, 16)), ((17, 16, 4), (3, 3, 4, 2))],
)
def test_auto_takes_one_small_convolution_for_images_of_a_few_pixels(
    shape: tuple[int, ...], conv: tuple[int, ...]
) -> None:
    networks = jax.eval_shape(make(spaces.Box(0, 1, shape)).new_networks, jax.random.key(0))
    shapes = [leaf.shape for leaf in jax.tree.leaves(networks) if leaf.ndim == 4]
    assert shapes[0] == conv
    assert (len(shapes) == 1) == (conv[-1] == 16)


@pytest.mark.slow
def test_a_record_from_before_the_small_convolution_keeps_its_network() -> None:
    record = dataclasses.asdict(ImpalaConfig(torso=SMALL))
    assert dataclass_from_json(ImpalaConfig, record) == ImpalaConfig(torso=SMALL)
    for name in ("small_image_pixels", "normalize_small_images"):
        del record["torso"][name]
    older = dataclass_from_json(ImpalaConfig, record)
    assert not older.torso.normalize_small_images
    agent = Impala(EnvSpec(spaces.Box(0, 1, (7, 7, 3)), TWO), older)
    shapes = [leaf.shape for leaf in jax.tree.leaves(agent.new_networks(jax.random.key(0)))]
    assert (3, 3, 3, SMALL.resnet_channels[0]) in shapes


@pytest.mark.slow
def test_separate_value_torso_keeps_the_value_gradient_off_the_policy() -> None:
    rng = np.random.default_rng(0)
    obs = rng.normal(size=(3, 4, 6)).astype(np.float32)
    for separate in (False, True):
        agent = make(spaces.Box(-1, 1, (6,)), separate_value_torso=separate)
        networks = jax.jit(agent.new_networks)(jax.random.key(0))

        def value(networks: Any, agent: Impala = agent) -> jax.Array:
            return agent.evaluate(networks, obs, (), np.zeros((3, 4), bool)).value.sum()

        torso = jax.tree.leaves(jax.jit(jax.grad(value))(networks)["torso"])
        assert any(np.any(leaf) for leaf in torso) != separate


@pytest.mark.parametrize("lstm_size", [0, 7])
def test_one_row_at_a_time_is_all_rows_at_once(lstm_size: int) -> None:
    agent = make(spaces.Box(-1, 1, (6,)), spaces.Box(-1, 1, (3,)), lstm_size=lstm_size)
    networks = jax.jit(agent.new_networks)(jax.random.key(0))
    rng = np.random.default_rng(0)
    obs = rng.normal(size=(5, 4, 6)).astype(np.float32)
    is_first = rng.random((5, 4)) < 0.3
    core = tuple(jnp.asarray(rng.normal(size=(4, lstm_size)), jnp.float32) for _ in range(2))
    core = core if lstm_size else ()
    evaluate = jax.jit(agent.evaluate)
    whole = evaluate(networks, obs, core, is_first)
    for t in range(5):
        row = evaluate(networks, obs[t : t + 1], core, is_first[t : t + 1])
        core = row.core
        np.testing.assert_allclose(row.params[0], whole.params[t], atol=1e-5)
        np.testing.assert_allclose(row.value[0], whole.value[t], atol=1e-5)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), core, whole.core)


@pytest.mark.slow
def test_recurrent_state_is_reset_before_the_first_observation_of_an_episode() -> None:
    agent = make(spaces.Box(-1, 1, (6,)), lstm_size=7)
    networks = jax.jit(agent.new_networks)(jax.random.key(0))
    obs = np.random.default_rng(0).normal(size=(2, 4, 6)).astype(np.float32)
    stale = tuple(jnp.full((4, 7), 3.0) for _ in range(2))
    zero = tuple(jnp.zeros((4, 7)) for _ in range(2))
    first = np.array([[True] * 4, [False] * 4])
    evaluate = jax.jit(agent.evaluate)
    a, b = (evaluate(networks, obs, core, first).value for core in (stale, zero))
    np.testing.assert_array_equal(a, b)
    c = evaluate(networks, obs, stale, ~first).value
    assert not np.allclose(a[0], c[0])
    # Reset at row 1: what row 0 left is forgotten.
    d = evaluate(networks, obs[1:], zero, first[:1]).value
    np.testing.assert_allclose(c[1], d[0], atol=1e-5)


def test_the_free_parameter_of_a_gaussian_is_the_initial_std() -> None:
    agent = make(spaces.Box(-1, 1, (3,)), spaces.Box(-1, 1, (2,)), initial_std=0.25)
    networks = jax.jit(agent.new_networks)(jax.random.key(0))
    out = jax.jit(agent.evaluate)(
        networks, np.ones((1, 4, 3), np.float32), (), np.zeros((1, 4), bool)
    )
    np.testing.assert_allclose(out.params[..., 2:], np.full((1, 4, 2), np.log(0.25)), rtol=1e-6)


# bfloat16.

LAYERS = ("dot_general", "conv_general_dilated")


def layer_dtypes(jaxpr: Any) -> list[str]:
    """Return the dtype of the result of each matrix product and convolution, in their order."""
    found = []
    for equation in jaxpr.eqns:
        if equation.primitive.name in LAYERS:
            found.append(str(equation.outvars[0].aval.dtype))
        for inner in jaxprs_in_params(equation.params):
            found += layer_dtypes(inner)
    return found


@pytest.mark.parametrize(
    ("shape", "dtype", "layers"),
    [((6,), np.float32, 1), ((7, 7, 3), np.float32, 2), ((17, 17, 3), np.float32, 11),
     ((36, 36, 4), np.uint8, 4)],
)  # fmt: skip
def test_bfloat16_is_the_format_of_the_torso_and_of_nothing_else(
    shape: Any, dtype: Any, layers: int
) -> None:
    space = spaces.Box(0, 255 if dtype == np.uint8 else 1, shape, dtype)
    agent = make(space, torso=dataclasses.replace(SMALL, dtype="bfloat16"), lstm_size=3)
    networks = quick_state(agent, RunSpec(2, 1, 4, 1)).networks
    assert {leaf.dtype for leaf in jax.tree.leaves(networks)} == {jnp.dtype("float32")}
    obs = np.random.default_rng(0).uniform(0, space.high.max(), (1, 2, *shape)).astype(dtype)
    given = networks, obs, zero_core(agent.config, 2), np.zeros((1, 2), bool)
    found = layer_dtypes(jax.make_jaxpr(agent.evaluate)(*given).jaxpr)
    assert found[:layers] == ["bfloat16"] * layers
    assert set(found[layers:]) == {"float32"} and len(found) >= layers + 3
    encoded = agent._encode(obs, num_leading=2)
    features, exact = (
        jax.jit(Torso(torso).apply)({"params": networks["torso"]}, encoded)
        for torso in (agent.config.torso, SMALL)
    )
    assert features.dtype == jnp.float32 and not np.array_equal(features, exact)
    np.testing.assert_allclose(features, exact, atol=0.05 * np.abs(exact).max())


def test_bfloat16_is_refused_for_a_network_of_ones_own() -> None:
    with pytest.raises(UsageError, match=r"torso.dtype='bfloat16' cannot be applied to your own"):
        TorsoConfig("tests.support.own:MyTorso", dtype="bfloat16")


@pytest.mark.parametrize("kind", ["mlp", "small_cnn", "board_cnn", "nature_cnn", "impala_resnet"])
def test_the_size_of_kernels_does_not_matter_with_layer_norm(kind: Any) -> None:
    side = 36 if kind == "nature_cnn" else 8
    image = jax.random.uniform(jax.random.key(0), (3, side, side, 2))
    encoded = Encoded(image.reshape(3, -1)[:, :5], ())
    if kind != "mlp":
        encoded = Encoded(jnp.zeros((3, 0)), (image,))

    def change(layer_norm: bool) -> float:
        """Return how far ten times the last kernel moves features."""
        config = TorsoConfig(
            kind, (6, 6), image_features=6, resnet_channels=(2,), layer_norm=layer_norm
        )
        torso = Torso(config)
        params: Any = torso.init(jax.random.key(1), encoded)
        before = torso.apply(params, encoded)
        large = jax.tree_util.tree_map_with_path(
            lambda path, x: 10 * x if "Dense" in str(path) and x.ndim > 1 else x, params
        )
        after = torso.apply(large, encoded)
        return float(jnp.max(jnp.abs(after - before)))

    assert change(layer_norm=True) < 1e-3
    assert change(layer_norm=False) > 0.1


@pytest.mark.parametrize(
    ("kind", "shape", "is_image"),
    [
        ("auto", (6, 7, 2), False),
        ("mlp", (6, 7, 2), False),
        ("board_cnn", (6, 7, 2), True),
        ("small_cnn", (6, 7, 2), False),
        ("board_cnn", (7,), False),
    ],
)
def test_a_board_is_an_image_only_for_its_own_network(kind, shape, is_image):
    spec = EnvSpec(spaces.MultiBinary(shape), spaces.Discrete(3))
    agent = PPO(spec, PPOConfig(torso=TorsoConfig(kind, hidden_sizes=(5,))))
    board = np.random.default_rng(0).integers(2, size=(4, 1, *shape)).astype(np.int8)
    encoded = agent._encode(board, num_leading=2)
    if is_image:
        np.testing.assert_array_equal(encoded.images[0], board[:, 0])
    assert encoded.vector.shape == (4, 0 if is_image else board[0].size)
    networks = jax.eval_shape(agent.new_networks, jax.random.key(0))
    kernels = [x.shape for x in jax.tree.leaves(networks) if x.ndim == 4]
    assert set(kernels) == ({(4, 4, 2, 64)} if is_image else set())


def test_a_board_that_is_smaller_than_a_window_is_refused():
    spec = EnvSpec(spaces.MultiBinary((3, 3, 2)), spaces.Discrete(9))
    with pytest.raises(UsageError, match=r"'board_cnn' needs images of 4 x 4 pixels, not 3 x 3"):
        jax.eval_shape(
            PPO(spec, PPOConfig(torso=TorsoConfig("board_cnn"))).new_networks, jax.random.key(0)
        )
