"""The data that flows: environment steps, trajectories, and the specs that shape them.

All arrays are time-major, ``[T, B, ...]``: T environment steps of B environments. This module
and :mod:`sebulba.agent` are the contracts; everything else depends on them and they on nothing.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import (
    TYPE_CHECKING,
    Any,
    Literal,
    NamedTuple,
    Protocol,
    TypeAlias,
    TypeVar,
    runtime_checkable,
)

import gymnasium
import numpy as np

if TYPE_CHECKING:  # worker processes of environments import this module, and need no JAX
    import jax

PyTree: TypeAlias = Any
"""Any nesting of tuples, dicts and arrays that JAX can flatten."""


COMMON = "common"
"""The part of a multi-agent observation that all agents share: ``obs[COMMON]`` is ``[B, ...]``."""

OBSERVATION = "observation"
"""Name of an observation of one part where it stands beside others."""

LEAST_PIXELS = 16
"""Height and width from which on an image of bytes is taken for a picture, not for a map."""


class FinalObs(NamedTuple):
    """Last observations of episodes whose end shares a row with the next episode's beginning."""

    obs: PyTree
    """``EnvStep.obs`` as it was before the reset; without meaning where it is not ``given``."""
    given: jax.Array | np.ndarray
    """An episode ended in this row, and ``obs`` is its last observation, ``[B]`` bool."""

    @classmethod
    def none(cls, obs: PyTree) -> FinalObs:
        """Return zeros in the shapes of ``obs [B, ...]``, none of them given."""
        import jax

        zeros = jax.tree.map(np.zeros_like, obs)
        return cls(zeros, np.zeros(len(jax.tree.leaves(obs)[0]), np.bool_))


class EnvStep(NamedTuple):
    """What a vector environment shows at time t; every leaf is ``[B, ...]``.

    With many agents (``MultiAgentSpec``) every field is a dict by group of ``[B, A, ...]``, where A
    is the number of slots of the group; ``obs`` has what all observe under ``COMMON``.

    ``reward``, ``terminated`` and ``truncated`` are consequences of ``prev_action``: transition t
    is ``(obs_t, action_t, reward_{t+1}, terminated_{t+1}, truncated_{t+1}, obs_{t+1})``.
    """

    obs: PyTree
    """Observation, ``[B, *observation_shape]`` (a dict of these for a Dict space)."""
    prev_action: jax.Array | np.ndarray
    """Action that led here, ``[B, *action_shape]``; zeros before the first step."""
    reward: jax.Array | np.ndarray
    """Reward of ``prev_action`` as the learner sees it (perhaps clipped), ``[B]`` float32."""
    terminated: jax.Array | np.ndarray
    """The episode ended in a terminal state, ``[B]`` bool: nothing to bootstrap from."""
    truncated: jax.Array | np.ndarray
    """The episode was cut short, ``[B]`` bool: bootstrap from the last observation."""
    is_first: jax.Array | np.ndarray
    """``obs`` begins an episode, ``[B]`` bool."""
    final: FinalObs | tuple[()] = ()
    """Last observations of episodes that ended here, where the environment resets in the same step
    and the agent asks for them (``Agent.uses_final_obs``); ``()`` in all other runs."""
    acting: PyTree = ()
    """Who chooses an action now, ``{group: [B, A]}`` bool, of the groups in which agents may wait.
    ``()`` for a single agent, which always does."""

    # What kind of transition ended in this row. Transition t of a trajectory ends in row t+1, so
    # ``env_step.valid[1:]`` belongs to its T transitions.

    @property
    def valid(self) -> jax.Array | np.ndarray:
        """A transition that can be learned from ended here, ``[B]`` bool.

        Neither ``inserted`` nor ``masked_truncation``. A termination always is valid: its last
        observation may be lost, but nothing bootstraps from it.
        """
        valid = self.terminated | ~self.is_first
        return valid | self.final.given if isinstance(self.final, FinalObs) else valid

    @property
    def inserted(self) -> jax.Array | np.ndarray:
        """The row is the reset after an episode, ``[B]`` bool: ``prev_action`` was ignored."""
        return self.is_first & ~(self.terminated | self.truncated)

    @property
    def masked_truncation(self) -> jax.Array | np.ndarray:
        """The episode was cut short and reset in one step, ``[B]`` bool, and ``final`` lacks it."""
        masked = self.is_first & self.truncated & ~self.terminated
        return masked & ~self.final.given if isinstance(self.final, FinalObs) else masked


class ActionOutput(NamedTuple):
    """What ``Agent.step`` decides."""

    action: jax.Array
    """What the environment receives, ``[B, *action_shape]``, in dtype and bounds of its space."""
    extras: PyTree = ()
    """Whatever the loss needs from acting, a pytree of ``[B, ...]``."""


class ActionMoments(NamedTuple):
    """Mean and spread of the actions that an environment with a Box receives, in its units.

    They are those after squashing and clipping into the bounds, so the mean differs from the
    action of the evaluation policy where a bound is near.
    """

    mean: jax.Array | np.ndarray
    """``[B, *action_shape]`` float32."""
    std: jax.Array | np.ndarray
    """Standard deviation of each component, ``[B, *action_shape]`` float32."""


class Trajectory(NamedTuple):
    """One cycle of one Inferencer: T transitions of B environments."""

    env_step: EnvStep
    """``[T+1, B, ...]``; row T is the bootstrap row and row 0 of the next trajectory."""
    action: jax.Array | np.ndarray
    """``[T, B, ...]``."""
    extras: PyTree
    """``ActionOutput.extras``, ``[T, B, ...]``."""
    policy_version: jax.Array | np.ndarray | np.int32 = np.int32(0)
    """Scalar int32: version of the networks that acted."""
    inferencer: jax.Array | np.ndarray | np.int32 = np.int32(0)
    """Scalar int32: which Inferencer made it."""
    cycle: jax.Array | np.ndarray | np.int32 = np.int32(0)
    """Scalar int32: number of the cycle in that Inferencer; a gap means a missing trajectory."""


class StepInfos(NamedTuple):
    """Episode bookkeeping of one cycle, host arrays from the environment adapter.

    Not what the learner sees: rewards are unclipped, and ``episode_end`` is the end of the whole
    game even where a lost life is ``terminated``.
    """

    unclipped_reward: PyTree
    """``[T, B]`` float32; with many agents ``{group: [T, B, A]}``."""
    episode_end: np.ndarray
    """``[T, B]`` bool."""
    inserted: np.ndarray
    """``[T, B]`` bool, ``EnvStep.inserted``: a reset and not a transition."""
    masked_truncation: np.ndarray
    """``[T, B]`` bool, ``EnvStep.masked_truncation``: the loss has nothing to bootstrap from."""
    episode_returns: np.ndarray
    """``[N]`` float64: returns of the N episodes that ended in this cycle, in time order: sums of
    ``unclipped_reward``."""
    episode_lengths: np.ndarray
    """``[N]`` int64: their lengths in environment steps."""
    slot_returns: PyTree = ()
    """With many agents ``{group: [N, A]}`` float64: the return of every slot, NaN for one that
    never acted. ``episode_returns`` is the mean over all slots of all groups."""
    slot_lengths: PyTree = ()
    """With many agents ``{group: [N, A]}`` int64: how often every slot acted."""
    streams: np.ndarray | tuple[()] = ()
    """``[3, B]`` int64 where columns are of streams that change places: the stream, how many
    columns it had before, and 1 if this one begins an episode; ``()`` where column b continues
    column b of the cycle before."""


class EnvOutput(NamedTuple):
    """What an environment adapter returns from ``reset`` and ``step``; leaves are ``[B, ...]``.

    NumPy arrays that nobody writes again, or JAX arrays inside a fused cycle.
    """

    obs: PyTree
    """``EnvStep.obs``."""
    reward: Any
    """``EnvStep.reward``."""
    terminated: Any
    """``EnvStep.terminated``."""
    truncated: Any
    """``EnvStep.truncated``."""
    is_first: Any
    """``EnvStep.is_first``."""
    unclipped_reward: Any
    """``[B]`` float32: the reward before any clipping."""
    episode_end: Any
    """``[B]`` bool: the whole game ended (never a mere lost life), with many agents for all."""
    final: FinalObs | tuple[()] = ()
    """``EnvStep.final``; in every output or in none, as ``EnvSpec.final_obs`` says."""
    acting: PyTree = ()
    """``EnvStep.acting``."""

    @classmethod
    def first(cls, obs: PyTree, num_envs: int, final: FinalObs | tuple[()] = ()) -> EnvOutput:
        """Return the output of a reset: no reward, no flag but ``is_first``."""
        no_flag = np.zeros(num_envs, np.bool_)
        no_reward = np.zeros(num_envs, np.float32)
        return cls(obs, no_reward, no_flag, no_flag, ~no_flag, no_reward, no_flag, final)


class FusedEnv(NamedTuple):
    """A vector environment as pure JAX functions, for a fused cycle."""

    state: PyTree
    """Array pytree threaded through every step (handle, previous end flags).

    It is that of the environment after its latest ``reset``: read and copy it after each reset.
    """
    step: Callable[[PyTree, jax.Array], tuple[PyTree, EnvOutput, jax.Array]]
    """``(state, action [B, ...]) -> (state, EnvOutput, num_invalid)``.

    Actions outside the space are clamped into it before the environment sees them;
    ``num_invalid`` (scalar int32) counts them.
    """
    is_pure: bool = False
    """``state`` is all that there is, and ``step`` runs nothing but JAX. So it runs on any device,
    and a copy of the state goes on exactly where the environment stood."""
    saved_by_adapter: bool = False
    """What there is beside ``state`` the adapter saves and puts back, after steps of this as after
    its own; ``state`` then says only where that is."""


class EnvAdapter(Protocol):
    """One vector environment behind one interface, whatever its backend.

    Rows are always in environment order; arrays are fresh or copied (JAX may alias a NumPy array
    that it is given, so nothing handed out is written again); dtypes are those of ``spec``.

    An adapter may have three more methods. ``as_played()`` returns the one in which policies are
    evaluated. ``metrics_of(adapters)``, a static one, returns metrics of those of all Inferencers.
    ``make_cycle(programs, device, timer)`` returns the cycle of an environment that nobody steps.
    """

    spec: Any
    """An ``EnvSpec``, or a ``MultiAgentSpec``."""
    num_envs: int

    def reset(self) -> EnvOutput:
        """Begin new episodes in all environments; all flags false but ``is_first``."""
        ...

    def step(self, action: Any) -> EnvOutput:
        """Act in all environments; raises ActionError before an invalid action gets through."""
        ...

    def fused(self) -> FusedEnv | str:
        """Return the environment as JAX functions, or the reason why it has none.

        The returned state is that of an environment just ``reset``; once its step has been
        called, step through nothing else until the next ``reset``.
        """
        ...

    def state(self) -> bytes | str:
        """Return what is needed to go on from here, between two steps, exactly as it would have.

        If that is impossible, return the reason in words. An adapter that lacks this method or
        ``put_back`` counts as one that cannot.
        """
        ...

    def put_back(self, state: bytes) -> None:
        """Go on from ``state``, in an adapter newly made by the same factory with as many envs.

        It may be a pickle, which runs code: give this nothing but what a run of your own saved.

        Raises:
          EnvError: ``state`` does not fit or is damaged; the adapter then needs a ``reset``.
        """
        ...

    def close(self) -> None:
        """Free everything; may be called twice."""
        ...


class EnvFactory(Protocol):
    """Makes the vector environment of one Inferencer."""

    def __call__(self, num_envs: int, seeds: list[int]) -> EnvAdapter:
        """Make ``num_envs`` environments; environment i is seeded with ``seeds[i]`` (int32)."""
        ...


class MetricWriter(Protocol):
    """Where the metrics of a run go. An exception here becomes a warning and never ends a run."""

    def write(self, metrics: Mapping[str, Any]) -> None:
        """Write one window of updates: numbers, None (not known), ``[H, W, C]`` uint8 images."""
        ...

    def close(self) -> None:
        """Flush and free everything; may be called twice."""
        ...


Callback: TypeAlias = Callable[[Mapping[str, Any]], str | None]
"""Called with every record of metrics, in the thread of ``run()``, after it was written. What it
returns ends the run early and says why; None goes on. What it raises ends the run as a failure. It
may call ``stop`` and ``newest_networks`` of the loop."""

RunEnd: TypeAlias = Literal["finished", "stopped", "failed"]
"""How a run ended; a stopped one was ended early by a signal, and one that a callback ended early
is finished."""


@runtime_checkable
class EndWriter(MetricWriter, Protocol):
    """A writer that the command line tells how the run ended."""

    def end(self, end: RunEnd) -> None:
        """Note how the run ended; called before ``close``, after everything was saved."""
        ...


class RunInfo(NamedTuple):
    """What a writer that ``--writers`` names is given when the run begins or is resumed."""

    folder: Path
    """Folder of the run."""
    run_id: str
    """Tells this run from all others; a resumed run keeps it."""
    config: Mapping[str, Any]
    """The configuration by dotted name (``agent.learning_rate``), in a form for JSON."""
    resumed_at: int | None
    """Environment steps at which the run is resumed; None where it begins."""


@dataclasses.dataclass(frozen=True)
class EnvSpec:
    """A single environment as an agent sees it.

    Dtypes are those that reach JAX: float64 is float32 and int64 is int32 (the adapter casts).
    """

    observation_space: gymnasium.Space
    """Box, Discrete, MultiDiscrete, MultiBinary, or Dict of these."""
    action_space: gymnasium.Space
    """Box, Discrete or MultiDiscrete."""
    frame_stack: int = 0
    """If positive, axis 0 of an image observation stacks this many frames, newest last."""
    frame_skip: int = 1
    """Frames of the game per environment step."""
    name: str = ""
    """For messages."""
    channels_first: bool | Sequence[str] | None = None
    """Whether images (a Box of 3 dimensions) are ``[channels, height, width]`` rather than
    ``[height, width, channels]``; or the names of those parts of a Dict that are.

    Where it is None, it is set when the spec is made, and stays None only without images. Axis 0
    then counts channels if ``frame_stack`` says so, and in pixels: uint8 images of at least 16 x 16
    whose axis 0 is shorter than both others, which are stacks of frames. All other images have
    channels last, as in Gymnasium: maps of grid worlds have many channels and few cells, so sizes
    tell nothing of them."""
    final_obs: bool = False
    """The environment resets in the step that ends an episode (same-step or disabled autoreset),
    and ``EnvOutput.final`` has what was observed before that."""
    eval_only: tuple[str, ...] = ()
    """Parts of the observation that ``Agent.step`` never sees: they are for the learner alone."""
    legal_actions: str | None = None
    """The part of the observation that says which actions are legal: MultiBinary, an entry for each
    action of a Discrete, or for each of all entries of a MultiDiscrete, side by side."""

    def __post_init__(self) -> None:
        """Set ``channels_first``."""
        space = self.observation_space
        parts = space.spaces if isinstance(space, gymnasium.spaces.Dict) else {"": space}
        images = {
            name: self.frame_stack > 0 or _is_stack_of_pixels(part)
            for name, part in parts.items()
            if isinstance(part, gymnasium.spaces.Box) and len(part.shape) == 3
        }
        if self.channels_first is None and images:
            first = tuple(name for name, is_first in images.items() if is_first)
            object.__setattr__(
                self, "channels_first", first if 0 < len(first) < len(images) else bool(first)
            )

    @property
    def policy_spec(self) -> EnvSpec:
        """What the policy sees: without parts of the observation that are ``eval_only``."""
        space = self.observation_space
        if not self.eval_only or not isinstance(space, gymnasium.spaces.Dict):
            return self
        seen = {name: part for name, part in space.items() if name not in self.eval_only}
        first = self.channels_first
        if isinstance(first, Sequence):
            first = tuple(name for name in first if name in seen)
        return dataclasses.replace(
            self, observation_space=gymnasium.spaces.Dict(seen), eval_only=(), channels_first=first
        )

    def has_channels_first(self, part: str = "") -> bool:
        """Return ``channels_first`` of the observation, or of one part of a Dict."""
        first = self.channels_first
        return part in first if isinstance(first, Sequence) else bool(first)


def _is_stack_of_pixels(image: gymnasium.spaces.Box) -> bool:
    smallest = min(image.shape[1:])
    return image.dtype == np.uint8 and smallest >= LEAST_PIXELS and image.shape[0] < smallest


@dataclasses.dataclass(frozen=True)
class Group:
    """Agents with equal observations and actions; each has a *slot* in it."""

    spec: EnvSpec
    """What one of them observes and does; ``COMMON``, if there is such a part, included."""
    slots: tuple[str, ...]
    """Names of the A slots."""
    waits: bool = False
    """Some rows have slots that choose no action: turns, agents that died or have not joined."""


@dataclasses.dataclass(frozen=True)
class Team:
    """A population of the tree."""

    name: str
    """Its path; empty for the whole."""
    slots: tuple[str, ...]
    """Who is in it, as ``group/slot``."""
    payoff: str = "general"
    """``"cooperative"``, ``"zero_sum"`` or ``"general"``."""
    symmetric: bool = False
    """Its slots can change places."""


@dataclasses.dataclass(frozen=True)
class MultiAgentSpec:
    """An environment of many agents as a ``MultiAgent`` sees it."""

    groups: Mapping[str, Group]
    """By name, in the order of the tree."""
    common: gymnasium.Space | None = None
    """What all agents observe, which is stored once."""
    teams: tuple[Team, ...] = ()
    """The populations of the tree, the whole first."""
    name: str = ""
    """Name of the environment."""
    frame_stack: int = 0
    """0: no stacks of frames are taken apart."""
    final_obs: bool = False
    """False: environments of many agents reset in the step after the end."""
    frame_skip: int = 1
    """Frames of the emulator in an environment step."""

    @property
    def observation_space(self) -> gymnasium.spaces.Dict:
        """Observations of one environment: ``[A, ...]`` by group, and ``COMMON``."""
        spaces = {name: _stacked(_own(group.spec), group) for name, group in self.groups.items()}
        return gymnasium.spaces.Dict(
            spaces if self.common is None else {**spaces, COMMON: self.common}
        )

    @property
    def action_space(self) -> gymnasium.spaces.Dict:
        """Actions of one environment, ``[A, ...]`` by group."""
        return gymnasium.spaces.Dict(
            {name: _stacked(group.spec.action_space, group) for name, group in self.groups.items()}
        )


def _own(spec: EnvSpec) -> gymnasium.Space:
    """Return what a slot observes without what is common to all."""
    space = spec.observation_space
    if not isinstance(space, gymnasium.spaces.Dict) or COMMON not in space.spaces:
        return space
    return gymnasium.spaces.Dict({k: v for k, v in space.spaces.items() if k != COMMON})


def _stacked(space: gymnasium.Space, group: Group) -> gymnasium.Space:
    """Return the space of ``[A, ...]``, in the dtypes of ``space``."""
    if isinstance(space, gymnasium.spaces.Dict):
        return gymnasium.spaces.Dict({k: _stacked(v, group) for k, v in space.spaces.items()})
    size = len(group.slots)
    if isinstance(space, gymnasium.spaces.Discrete):
        many = np.full(size, space.n), np.full(size, space.start)
        return gymnasium.spaces.MultiDiscrete(many[0], dtype=np.int32, start=many[1])
    if isinstance(space, gymnasium.spaces.MultiBinary):
        return gymnasium.spaces.MultiBinary((size, *space.shape))
    if isinstance(space, gymnasium.spaces.MultiDiscrete):
        nvec, start = (np.stack([x] * size) for x in (space.nvec, space.start))
        return gymnasium.spaces.MultiDiscrete(nvec, dtype=np.int32, start=start)
    assert isinstance(space, gymnasium.spaces.Box)
    low, high = (np.stack([x] * size) for x in (space.low, space.high))
    return gymnasium.spaces.Box(low, high, dtype=space.dtype.type)


@dataclasses.dataclass(frozen=True)
class RunSpec:
    """What only the loop knows when it asks an agent for a new state."""

    num_envs: int
    """B: environments per Inferencer."""
    num_inferencers: int
    """Inferencers over all inference devices."""
    steps_per_cycle: int
    """T: the unroll length."""
    num_update_devices: int
    """Devices over which B is split for the update."""
    num_hosts: int = 1
    """Hosts that learn together. The other numbers are those of each."""

    @property
    def num_envs_in_all(self) -> int:
        """Environments of all Inferencers of all hosts."""
        return self.num_hosts * self.num_inferencers * self.num_envs


RowT = TypeVar("RowT", EnvStep, EnvOutput)


def policy_row(spec: EnvSpec | MultiAgentSpec, row: RowT) -> RowT:
    """Return rows of an environment without the parts of observations that are ``eval_only``.

    With many agents, rows stay as they are: ``MultiAgent`` decides what each member sees.
    """
    hidden = spec.eval_only if isinstance(spec, EnvSpec) else ()
    if not hidden:
        return row
    final = row.final
    if isinstance(final, FinalObs):
        final = final._replace(obs=without_parts(final.obs, hidden))
    return row._replace(obs=without_parts(row.obs, hidden), final=final)


def without_parts(obs: Mapping[str, PyTree], names: Sequence[str]) -> dict[str, PyTree]:
    """Return an observation without the parts that are named."""
    return {name: part for name, part in obs.items() if name not in names}


def empty_env_step(spec: EnvSpec | MultiAgentSpec, num_envs: int) -> EnvStep:
    """Return an ``EnvStep`` of NumPy zeros, ``[B, ...]``, with the dtypes of ``spec``."""

    def zeros(space: gymnasium.Space) -> PyTree:
        if isinstance(space, gymnasium.spaces.Dict):
            return {name: zeros(space[name]) for name in sorted(space.spaces)}
        return np.zeros((num_envs, *(space.shape or ())), space.dtype)

    def of_slots(dtype: Any, *, waiting: bool = False) -> PyTree:
        if isinstance(spec, EnvSpec):
            return () if waiting else np.zeros((num_envs,), dtype)
        groups = {n: g for n, g in spec.groups.items() if g.waits or not waiting}
        arrays = {n: np.zeros((num_envs, len(g.slots)), dtype) for n, g in groups.items()}
        return arrays or ()

    flag = of_slots(np.bool_)
    return EnvStep(
        obs=zeros(spec.observation_space),
        prev_action=zeros(spec.action_space),
        reward=of_slots(np.float32),
        terminated=flag,
        truncated=flag,
        is_first=flag,
        acting=of_slots(np.bool_, waiting=True),
    )
