"""The trained policy on disk and in use: data only, no pickle, no loop, no environment."""

from __future__ import annotations

import dataclasses
import hashlib
import importlib
import io
import json
import math
import os
import zipfile
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import gymnasium
import jax
import numpy as np
from gymnasium import spaces

from sebulba.agent import Agent
from sebulba.agents.configs.agent_config import agent_configs
from sebulba.agents.configs.multi_agent import MultiAgentConfig
from sebulba.agents.configs.network_and_optimizer import own_torsos
from sebulba.agents.multi.multi_agent import MultiAgent
from sebulba.errors import UsageError, shown, text_of
from sebulba.policies.card import CARD_FILE, policy_card, population_card
from sebulba.policies.pretrained import folder_of
from sebulba.support.files import (
    check_no_link,
    check_regular,
    dataclass_from_json,
    read_json_object,
)
from sebulba.support.key_streams import POLICY_STREAM
from sebulba.support.trees import named_leaves
from sebulba.support.trust import Trust, signed, trust_of, was_changed
from sebulba.support.user_code import CODE_FOLDERS, class_name, code_folders, find_code_in
from sebulba.types import EnvSpec, EnvStep, Group, MultiAgentSpec, PyTree, RunSpec, empty_env_step

CONFIG_FILE = "config.json"
ARRAYS_FILE = "arrays.npz"
VALUE_ARRAYS_FILE = "value_arrays.npz"
FORMAT = 1
KIND = "policy"
"""What the signature of ``config.json`` is of; see ``sebulba.support.trust``."""
MOST_HEADER_BYTES = 4096
"""Most bytes of an array in a file before its elements."""
SMALLEST_RUN = RunSpec(num_envs=1, num_inferencers=1, steps_per_cycle=1, num_update_devices=1)


class PolicyState(NamedTuple):
    """What a policy carries from call to call."""

    step: PyTree
    """The agent's step state."""
    prev_action: PyTree
    """``[B, *action_shape]``; with many agents ``{group: [B, A, *action_shape]}``."""


class Policy:
    """A trained agent that acts: ``action, state = policy(obs, state)``."""

    def __init__(
        self,
        agent: Agent,
        acting_networks: PyTree,
        run: RunSpec = SMALLEST_RUN,
        *,
        explore: bool = False,
        seed: int = 0,
        value_networks: PyTree = None,
    ) -> None:
        """Make a policy of an agent and its acting networks.

        Args:
          agent: The algorithm.
          acting_networks: ``Result.acting_networks``, or what ``load_policy`` read.
          run: Sizes of the run that trained it, for agents whose acting networks or exploration
            depend on them.
          explore: Act as in training, not as the evaluation policy.
          seed: Of the step state, for policies that draw random numbers.
          value_networks: What ``Agent.value_networks`` returned; ``value`` of some agents needs it.
        """
        self.agent = agent = agent.player
        self.value_networks = value_networks
        self.acting_networks = acting_networks
        self.run = run
        self.explore = explore
        if seed not in range(-(2**31), 2**31):
            raise UsageError(f"seed={seed!r} must be a 32-bit integer; use for example 0")
        self._key = jax.random.fold_in(jax.random.key(seed), POLICY_STREAM)
        self._step = jax.jit(partial(agent.act, explore=explore))
        self._value = jax.jit(agent.acting_value)
        self._distribution = jax.jit(agent.acting_distribution)

    @property
    def spec(self) -> EnvSpec:
        """The environment that it acts in, as it sees it."""
        spec = self.agent.spec
        return spec.policy_spec if isinstance(spec, EnvSpec) else spec

    def __call__(
        self,
        obs: PyTree,
        state: PolicyState | None = None,
        *,
        reward: Any = 0.0,
        terminated: Any = False,
        truncated: Any = False,
        is_first: Any = False,
    ) -> tuple[PyTree, PolicyState]:
        """Choose actions.

        Args:
          obs: One observation, or a batch of B; told by its shape.
          state: What the last call returned; None begins episodes.
          reward: Of the last action, ``[B]`` or one for all. Only agents that look at rewards
            need it; so it is with the next two.
          terminated: The last action ended an episode in a terminal state.
          truncated: The last action ended an episode by a limit.
          is_first: ``obs`` begins an episode, ``[B]`` or one for all; recurrent agents forget.

        Returns:
          An action (a batch of them for a batch), and the next state.

        Raises:
          UsageError: ``obs`` does not fit the observation space, or ``state`` is of another batch.
        """
        flags = {"terminated": terminated, "truncated": truncated, "is_first": is_first}
        env_step, state, single = self._row(obs, state, reward=reward, **flags)
        action, state = self.act(env_step, state)
        return (action[0] if single else action), state

    def value(self, obs: PyTree, state: PolicyState | None = None, **row: Any) -> np.ndarray:
        """Return what observations are worth: the expected sum of discounted rewards from there.

        It is in the environment's rewards: a reward scale, running normalisation of rewards and
        R2D2's rescaling are undone. Where rewards were clipped, it is of the clipped ones.
        On-policy agents say the value of the policy that samples, DQN and R2D2 the greatest value
        of an action, SAC and DDPG the smaller critic's of the evaluation policy's action; SAC's
        counts its bonus for entropy, too.

        Args:
          obs: One observation, or a batch of B.
          state: As for a call with the same ``obs``, which this does not take the place of.
          row: ``reward``, ``terminated``, ``truncated`` and ``is_first``, as for a call.

        Returns:
          ``[B]`` float32; a scalar for one observation.

        Raises:
          UsageError: The agent has no values, or they need networks that were not saved; or what
            a call raises.
        """
        env_step, state, single = self._asked_row(obs, state, row)
        self._check_has_value_networks()
        networks = self.acting_networks, self.value_networks
        value = np.asarray(self._value(*networks, state.step, env_step))
        return value[0] if single else value

    def distribution(self, obs: PyTree, state: PolicyState | None = None, **row: Any) -> PyTree:
        """Return the distribution of actions.

        Of on-policy agents and SAC it is what training samples from. DQN, R2D2 and DDPG have an
        action of probability 1, that of the evaluation policy.

        Args:
          obs: One observation, or a batch of B.
          state: As for a call with the same ``obs``, which this does not take the place of.
          row: ``reward``, ``terminated``, ``truncated`` and ``is_first``, as for a call.

        Returns:
          For a Discrete, probabilities ``[B, n]``, from the space's ``start``; for a MultiDiscrete,
          a tuple of those, one for each entry; for a Box, ``sebulba.types.ActionMoments``. Without
          B for one observation.

        Raises:
          UsageError: The agent does not say it, or what a call raises.
        """
        env_step, state, single = self._asked_row(obs, state, row)
        distribution = self._distribution(self.acting_networks, state.step, env_step)
        return jax.tree.map(lambda x: np.asarray(x)[0 if single else ...], distribution)

    def _check_has_value_networks(self) -> None:
        """Raise UsageError if values need networks that are not there."""
        if self.value_networks is not None:
            return
        if jax.tree.leaves(_shapes(self.agent, "value_networks", self.run)):
            raise UsageError(
                f"this policy has no value networks, which {type(self.agent).__name__} needs for "
                "values; runs save them in policy/ at their end, but not in best_policy/; load "
                "policy/, or train again"
            )
        self.value_networks = ()

    def _asked_row(
        self, obs: PyTree, state: PolicyState | None, row: Mapping[str, Any]
    ) -> tuple[EnvStep, PolicyState, bool]:
        """Return what ``_row`` does, and leave the actions that will be drawn as they are."""
        key = self._key
        try:
            return self._row(obs, state, **row)
        finally:
            self._key = key

    def _row(
        self,
        obs: PyTree,
        state: PolicyState | None,
        *,
        reward: Any = 0.0,
        terminated: Any = False,
        truncated: Any = False,
        is_first: Any = False,
    ) -> tuple[EnvStep, PolicyState, bool]:
        """Return the row of an environment, the state, and whether ``obs`` is a single one."""
        if isinstance(self.agent, MultiAgent):
            raise UsageError(
                f"this policy has the members {', '.join(self.agent.members)}; load that of one "
                "from the folder of its name, or call act() for all"
            )
        batch, single = _as_batch(obs, self.spec.observation_space)
        num_envs = len(jax.tree.leaves(batch)[0])
        if state is None:
            state, is_first = self.new_state(num_envs), True
        if len(state.prev_action) != num_envs:
            raise UsageError(
                f"obs is a batch of {num_envs}, but state is of {len(state.prev_action)}; "
                "begin with state=None for another batch"
            )

        def row(value: Any, dtype: Any) -> np.ndarray:
            return np.broadcast_to(np.asarray(value, dtype), (num_envs,))

        env_step = EnvStep(
            obs=batch,
            prev_action=state.prev_action,
            reward=row(reward, np.float32),
            terminated=row(terminated, np.bool_),
            truncated=row(truncated, np.bool_),
            is_first=row(is_first, np.bool_),
        )
        return env_step, state, single

    def act(self, env_step: EnvStep, state: PolicyState) -> tuple[PyTree, PolicyState]:
        """Choose actions for rows ``[B, ...]`` of an environment, of one agent or of many.

        Args:
          env_step: What it shows; its ``prev_action`` is not read.
          state: What the last call returned, or ``new_state``.
        """
        env_step = env_step._replace(prev_action=state.prev_action)
        output, step_state = self._step(self.acting_networks, state.step, env_step)
        action = jax.tree.map(np.asarray, output.action)
        return action, PolicyState(step_state, action)

    def new_state(self, num_envs: int) -> PolicyState:
        """Return the state before the first observation of ``num_envs`` environments."""
        one = {"num_inferencers": 1, "num_hosts": 1}
        run = dataclasses.replace(self.run, num_envs=num_envs, **one)
        self._key, step_key = jax.random.split(self._key)  # no two states draw the same noise
        return PolicyState(
            self.agent.new_step_state(step_key, run, 0),
            empty_env_step(self.spec, num_envs).prev_action,
        )


def _as_batch(obs: PyTree, space: gymnasium.Space) -> tuple[PyTree, bool]:
    """Return ``obs`` as a batch in the dtypes of ``space``, and whether it was a single one."""
    if isinstance(space, spaces.Dict):
        if not isinstance(obs, Mapping) or sorted(obs) != sorted(space.spaces):
            got = sorted(obs) if isinstance(obs, Mapping) else type(obs).__name__
            raise UsageError(f"obs={got} must be a dict with the keys {sorted(space.spaces)}")
        parts = {name: _as_batch(obs[name], space[name]) for name in sorted(space.spaces)}
        if len({single for _, single in parts.values()}) != 1:
            raise UsageError("obs mixes single observations and batches; give either")
        batch = {name: part for name, (part, _) in parts.items()}
        return batch, next(single for _, single in parts.values())
    shape = space.shape or ()
    array = np.asarray(obs)
    if array.shape != shape and (array.ndim == 0 or array.shape[1:] != shape):
        raise UsageError(
            f"obs has shape {array.shape}; expected {shape} for one observation or "
            f"{('B', *shape)} for a batch"
        )
    assert space.dtype is not None
    if array.dtype.kind == "f" and space.dtype.kind != "f":
        raise UsageError(f"obs has dtype {array.dtype}; expected {space.dtype}, unscaled")
    if not array.size and array.shape != shape:
        raise UsageError(f"obs has shape {array.shape}, which is no observation; give at least one")
    array = array.astype(space.dtype, copy=False)
    return (array[None], True) if array.shape == shape else (array, False)


# On disk.


def save_policy(
    folder: str | Path,
    agent: Agent,
    acting_networks: PyTree,
    run: RunSpec = SMALLEST_RUN,
    *,
    run_id: str | None = None,
    value_networks: PyTree = (),
    about: Mapping[str, Any] | None = None,
) -> None:
    """Write a policy into ``folder``: ``config.json``, signed with your key, and ``arrays.npz``.

    ``value_networks`` with arrays go into ``value_arrays.npz``, and a card for people into
    ``README.md``.

    Args:
      folder: Made if it is not there.
      agent: The algorithm; its class must be importable where the policy is loaded.
      acting_networks: ``Result.acting_networks``.
      run: Sizes of the run that trained it, for agents whose acting networks or exploration
        depend on them.
      run_id: What tells the run that trained it from others, if it has a folder.
      value_networks: What ``agent.value_networks(state.networks, state.experience)`` returns, so
        that the policy can say values; only some agents need it.
      about: More facts for its card, by what they are called there, such as ``{"return": 500.0}``.

    Raises:
      UsageError: The agent's class is inside a function, where it cannot be imported.
    """
    folder, agent = Path(folder), agent.player
    if isinstance(agent, MultiAgent):
        _save_members(folder, agent, acting_networks, run, run_id, value_networks, about or {})
        return
    spec = agent.spec.policy_spec
    arrays, value_arrays = _named_arrays(acting_networks), _named_arrays(value_networks)
    record = {
        "format": FORMAT,
        "run_id": run_id,
        "agent": class_name(type(agent)),
        "agent_config": {
            "class": class_name(type(agent.config)),
            "fields": dataclasses.asdict(agent.config),
        },
        "spec": {
            "name": spec.name,
            "frame_stack": spec.frame_stack,
            "frame_skip": spec.frame_skip,
            **_spec_to_json(spec),
        },
        "run": dataclasses.asdict(run),
        CODE_FOLDERS: code_folders(type(agent), type(agent.config)),
        "arrays": _described(arrays),
        **({"value_arrays": _described(value_arrays)} if value_arrays else {}),
    }
    folder.mkdir(parents=True, exist_ok=True)
    _write_arrays(folder / ARRAYS_FILE, arrays)
    if value_arrays:
        _write_arrays(folder / VALUE_ARRAYS_FILE, value_arrays)
    _write_record(folder, record, policy_card(agent, spec, about or {}))


def _write_record(folder: Path, record: Mapping[str, Any], card: str) -> None:
    (folder / CARD_FILE).write_text(card, encoding="utf-8")
    (folder / CONFIG_FILE).write_text(json.dumps(signed(KIND, record), indent=2) + "\n")


def _spec_to_json(spec: EnvSpec) -> dict[str, Any]:
    """Return what a policy and each group of agents say of what they observe and do."""
    return {
        "channels_first": spec.channels_first,
        "observation_space": space_to_json(spec.observation_space),
        "action_space": space_to_json(spec.action_space),
        **({"legal_actions": legal} if (legal := spec.legal_actions) else {}),
    }


def _spec_from_json(record: Mapping[str, Any], **fields: Any) -> EnvSpec:
    return EnvSpec(
        space_from_json(record["observation_space"]),
        space_from_json(record["action_space"]),
        channels_first=record["channels_first"],
        legal_actions=record.get("legal_actions"),
        **fields,
    )


def _named_arrays(networks: PyTree) -> dict[str, np.ndarray]:
    names, leaves = named_leaves(networks)
    return {name: np.asarray(leaf) for name, leaf in zip(names, leaves, strict=True)}


def _described(arrays: Mapping[str, np.ndarray]) -> list[dict[str, Any]]:
    return [
        {
            "name": name,
            "shape": array.shape,
            "dtype": array.dtype.name,
            "sha256": _sha256(_storable(array)),
        }
        for name, array in arrays.items()
    ]


def _write_arrays(file: Path, arrays: Mapping[str, np.ndarray]) -> None:
    storable = {name: _storable(array) for name, array in arrays.items()}
    with open(file, "wb") as opened:
        np.savez(opened, **storable)  # type: ignore[arg-type]


def load_policy(
    run: str | Path, *, explore: bool = False, seed: int = 0, trust: bool = False
) -> Policy:
    """Read the policy that a run left; neither loop nor environment is needed.

    Nothing that a stranger wrote is run: an agent that is not one of Sebulba's is imported only
    where your own key signed the policy, or where you say ``trust=True``.

    Args:
      run: Folder of the run, or its ``policy`` folder; or ``pretrained:NAME`` for a policy that
        comes with the package (``sebulba policies`` lists them).
      explore: Act as in training, not as the evaluation policy.
      seed: For policies that draw random numbers.
      trust: Import the agent that it names whoever wrote it.

    Raises:
      UsageError: A file is missing, damaged, edited, or another policy's; an array is not finite;
        or the agent cannot be imported, or is not to be trusted.
    """
    folder = folder_of(run)
    if os.path.isdir(folder / "policy"):
        folder = folder / "policy"
        check_no_link(folder)
    file = folder / CONFIG_FILE
    check_regular(file, links=False)
    record = read_json_object(file)
    if "format" not in record and "total_env_steps" in record:
        raise UsageError(f"{folder} has no policy yet; a run saves it at its end or after Ctrl-C")
    if "members" in record:
        return _load_members(folder, record, explore=explore, seed=seed, trust=trust)
    if record.get("format") != FORMAT:
        raise UsageError(
            f"{file} has format {shown(record.get('format'))}, and this Sebulba reads {FORMAT}; "
            "load it with the Sebulba that wrote it"
        )
    trusted = trust_of(KIND, record, trust)
    _check_unchanged(folder, record)
    if trusted.is_trusted:
        find_code_in(record.get(CODE_FOLDERS))
    try:
        agent, run_spec = _agent_of(record, file, trusted)
        shapes = _shapes(agent, "acting_networks", run_spec)
        checksums = {entry["name"]: entry["sha256"] for entry in record["arrays"]}
        value_checksums = {one["name"]: one["sha256"] for one in record.get("value_arrays", ())}
        if value_checksums:
            value_shapes = _shapes(agent, "value_networks", run_spec)
    except UsageError:
        raise
    except Exception as error:  # a damaged description may make anything raise
        raise UsageError(
            f"{file} is damaged ({text_of(error)}); restore it or train again"
        ) from error
    networks = _read_arrays(folder / ARRAYS_FILE, shapes, checksums)
    value_networks = None
    if value_checksums:
        file = folder / VALUE_ARRAYS_FILE
        value_networks = _read_arrays(file, value_shapes, value_checksums)
    return Policy(
        agent, networks, run_spec, explore=explore, seed=seed, value_networks=value_networks
    )


def _save_members(
    folder: Path,
    agent: MultiAgent,
    acting_networks: PyTree,
    run: RunSpec,
    run_id: str | None,
    value_networks: PyTree,
    about: Mapping[str, Any],
) -> None:
    """Write an ordinary policy for each member, ``folder/MEMBER``, and who they are."""
    functions = []
    for name, member in agent.members.items():
        own = dataclasses.replace(run, num_envs=run.num_envs * len(member.slots))
        values, actor = value_networks[name] if value_networks else (), member.agent
        if not member.trains:
            frozen: Policy | None = actor.policy  # type: ignore[attr-defined]
            if frozen is None:
                functions.append(name)
                continue
            actor, own = frozen.agent, frozen.run
        whose = {"member": name, **(about if member.trains else {"trained": "elsewhere; frozen"})}
        save_policy(
            folder / name, actor, acting_networks[name], own, value_networks=values, about=whose
        )
    spec = agent.population
    groups = {
        name: {
            "slots": list(group.slots),
            "waits": group.waits,
            "eval_only": list(group.spec.eval_only),
            **_spec_to_json(group.spec),
        }
        for name, group in spec.groups.items()
    }
    record = {
        "format": FORMAT,
        "run_id": run_id,
        "members": list(agent.members),
        **({"functions": functions} if functions else {}),
        "groups": groups,
        "common": None if spec.common is None else space_to_json(spec.common),
        "name": spec.name,
        "run": dataclasses.asdict(run),
    }
    _write_record(folder, record, population_card(agent.members, spec, about))


def _load_members(
    folder: Path, record: Mapping[str, Any], *, explore: bool, seed: int, trust: bool
) -> Policy:
    """Return the policy of all members together."""
    file = folder / CONFIG_FILE
    if was_changed(record):
        raise UsageError(f"{file} was changed after it was saved; restore it or train again")
    if functions := record.get("functions"):
        raise UsageError(
            f"{folder} lacks members that are functions ({shown(functions)}), which are not saved; "
            "load the policy of another member from the folder of its name"
        )
    try:
        groups = {}
        for name, one in record["groups"].items():
            seen = _spec_from_json(one, name=record["name"], eval_only=tuple(one["eval_only"]))
            groups[name] = Group(seen, tuple(one["slots"]), one["waits"])
        common = None if record["common"] is None else space_from_json(record["common"])
        spec = MultiAgentSpec(groups, common, name=record["name"])
        names, run = [str(name) for name in record["members"]], RunSpec(**record["run"])
    except (KeyError, TypeError, ValueError) as error:
        raise UsageError(
            f"{file} is damaged ({text_of(error)}); restore it or train again"
        ) from error
    if any(
        not name or Path(name).is_absolute() or {".", ".."} & {*Path(name).parts} for name in names
    ):
        raise UsageError(f"{file} names members outside its folder; restore it or train again")
    own = {name: load_policy(folder / name, trust=trust) for name in names}
    config = MultiAgentConfig({name: one.agent.config for name, one in own.items()})
    networks = {name: one.acting_networks for name, one in own.items()}
    return Policy(MultiAgent(spec, config), networks, run, explore=explore, seed=seed)


def _agent_of(record: Mapping[str, Any], file: Path, trust: Trust) -> tuple[Agent, RunSpec]:
    """Return the agent that ``config.json`` describes, and the sizes of its run."""
    config_class = _import_class(record["agent_config"]["class"], file, trust)
    agent_class = _import_class(record["agent"], file, trust)
    if not dataclasses.is_dataclass(config_class):
        name = record["agent_config"]["class"]
        raise UsageError(f"{file} names {name}, which is not a configuration (a dataclass)")
    if not issubclass(agent_class, Agent):
        raise UsageError(f"{file} names {record['agent']}, which is not a sebulba.Agent")
    config = dataclass_from_json(config_class, record["agent_config"]["fields"])
    for name in own_torsos(config):
        trust.check(f"{file} names the network {shown(name)}, which would be imported")
    names = "name", "frame_stack", "frame_skip"
    spec = _spec_from_json(record["spec"], **{name: record["spec"][name] for name in names})
    return agent_class(spec, config), RunSpec(**record["run"])


def _check_unchanged(folder: Path, record: Mapping[str, Any]) -> None:
    """Raise UsageError if ``config.json`` was edited, or lies in the folder of another run."""
    run_file = folder.parent / CONFIG_FILE
    check_regular(run_file, links=False)
    of_run = read_json_object(run_file) if run_file.is_file() else {}
    theirs, ours = record.get("run_id"), of_run.get("run_id")
    if theirs is not None and ours is not None and theirs != ours:
        raise UsageError(
            f"{folder} holds the policy of another run ({shown(theirs)}) than {run_file} "
            f"({shown(ours)}); restore the folder of one run, or give a copy of the policy folder "
            "alone"
        )
    if not was_changed(record):
        return
    own = record.get("agent_config")
    fields = own.get("fields") if isinstance(own, dict) else None
    trained = of_run.get("agent")
    different = []
    if isinstance(fields, dict) and isinstance(trained, dict):
        different = [
            f"{name} is {shown(fields[name])} and was {shown(trained[name])} in the run"
            for name in sorted(fields.keys() & trained.keys())
            if fields[name] != trained[name] and name != "optimizer"  # which says how long it falls
        ]
    raise UsageError(
        f"{folder / CONFIG_FILE} was changed after it was saved"
        f"{': ' if different else ''}{'; '.join(different)}; restore it or train again"
    )


def _shapes(agent: Agent, part: str, run: RunSpec) -> PyTree:
    """Return the shapes and dtypes of what the agent's method ``part`` returns in a new state."""
    agent = agent.for_run(run)

    def of_new(key: jax.Array) -> PyTree:
        networks = agent.new_networks(key)
        return getattr(agent, part)(networks, agent.new_experience(key, networks, run))

    return jax.eval_shape(of_new, jax.random.key(0))


def _read_arrays(file: Path, shapes: PyTree, checksums: Mapping[str, str]) -> PyTree:
    """Return the arrays in ``file`` in the structure of ``shapes``."""
    names, leaves = named_leaves(shapes)
    check_regular(file, links=False)
    try:
        # Opened here: np.load leaves a damaged file open.
        with open(file, "rb") as opened, zipfile.ZipFile(opened) as archive:
            there = {info.filename.removesuffix(".npy"): info for info in archive.infolist()}
            if sum(info.file_size for info in there.values()) > os.fstat(opened.fileno()).st_size:
                raise UsageError(f"{file} is compressed, as no run saves it; train again")
            if sorted(there) != sorted(names):
                odd = sorted(set(there) ^ set(names))
                raise UsageError(
                    f"{file} does not fit the agent, which differs in {odd[:3]}; load it with the "
                    "agent code and hyper-parameters that trained it"
                )
            restored = []
            for name, leaf in zip(names, leaves, strict=True):
                array = _read_array(archive, there[name], leaf, file)
                if checksums.get(name) != _sha256(_storable(array)):
                    raise UsageError(
                        f"{file} has another {name} than {CONFIG_FILE} has, so it belongs to "
                        "another policy; restore it or train again"
                    )
                if not np.isfinite(array).all():
                    raise UsageError(
                        f"{file} has {name} with values that are not finite (NaN or infinity); "
                        "use an older checkpoint, or train again"
                    )
                restored.append(jax.numpy.array(array, copy=True))
    except UsageError:
        raise
    except OSError as error:
        raise UsageError(
            f"{file} cannot be read ({error.strerror or error}); restore it or train again"
        ) from error
    except Exception as error:  # damaged bytes may make zipfile and NumPy raise any
        raise UsageError(f"{file} is damaged ({error}); restore it or train again") from error
    return jax.tree.unflatten(jax.tree.structure(shapes), restored)


def _read_array(
    archive: zipfile.ZipFile, info: zipfile.ZipInfo, leaf: Any, file: Path
) -> np.ndarray:
    """Read one array; its size is compared first, so that no file can ask for more memory."""
    if info.file_size > math.prod(leaf.shape) * np.dtype(leaf.dtype).itemsize + MOST_HEADER_BYTES:
        raise UsageError(
            f"{file} has {info.file_size} bytes for {info.filename}, and the agent expects "
            f"{leaf.dtype}{list(leaf.shape)}; load it with the agent code that trained it"
        )
    with archive.open(info) as member:
        array = np.lib.format.read_array(io.BytesIO(member.read()), allow_pickle=False)
    if array.dtype == _storable_dtype(leaf.dtype):
        array = array.view(leaf.dtype)
    if array.shape != leaf.shape or array.dtype != leaf.dtype:
        raise UsageError(
            f"{file} has {array.dtype}{list(array.shape)} for {info.filename}, and the agent "
            f"expects {leaf.dtype}{list(leaf.shape)}; load it with the agent code that trained it"
        )
    return array


def _sha256(array: np.ndarray) -> str:
    return hashlib.sha256(np.ascontiguousarray(array).tobytes()).hexdigest()


def _storable_dtype(dtype: np.dtype) -> np.dtype:
    """Return ``dtype``, or unsigned integers of its width for bfloat16 and its like.

    NumPy's file format does not know those.
    """
    dtype = np.dtype(dtype)
    return np.dtype(f"u{dtype.itemsize}") if dtype.kind == "V" else dtype


def _storable(array: np.ndarray) -> np.ndarray:
    return array.view(_storable_dtype(array.dtype))


def _import_class(name: str, file: Path, trust: Trust) -> type:
    """Return a class; one that is not Sebulba's own only if ``file`` is trusted."""
    own = {class_name(cls): cls.agent_class for cls in agent_configs().values()}
    ours = {known for pair in own.items() for known in pair if known.startswith("sebulba.agents.")}
    if name not in ours:
        trust.check(f"{file} names the class {shown(name)}, which would be imported")
    module_name, _, qualname = name.partition(":")
    try:
        found: Any = importlib.import_module(module_name)
        for part in qualname.split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError, ValueError) as error:
        raise UsageError(
            f"{file} names the class {name}, which cannot be imported ({error}); "
            "put its module on the Python path"
        ) from error
    if not isinstance(found, type):
        raise UsageError(f"{file} names {name}, which is not a class")
    return found


# Spaces as JSON.

LARGEST_SPACE = 2**28
"""Numbers in an observation; a description with more is damaged, and would take all memory."""


def space_to_json(space: gymnasium.Space) -> dict[str, Any]:
    """Return a space as a JSON object.

    Raises:
      UsageError: Sebulba does not know such a space.
    """
    if isinstance(space, spaces.Dict):
        parts = {name: space_to_json(part) for name, part in space.spaces.items()}
        return {"type": "Dict", "spaces": parts}
    record: dict[str, Any] = {"type": type(space).__name__, "dtype": np.dtype(space.dtype).name}
    match space:
        case spaces.Box():
            bounds = {"low": _bound_to_json(space.low), "high": _bound_to_json(space.high)}
            return record | {"shape": list(space.shape)} | bounds
        case spaces.Discrete():
            return record | {"n": int(space.n), "start": int(space.start)}
        case spaces.MultiDiscrete():
            return record | {"nvec": space.nvec.tolist(), "start": space.start.tolist()}
        case spaces.MultiBinary():
            return record | {"n": space.n if isinstance(space.n, int) else list(space.shape)}
    raise UsageError(
        f"space {space} cannot be saved; use Box, Discrete, MultiDiscrete, MultiBinary or a Dict"
    )


def space_from_json(record: Mapping[str, Any]) -> gymnasium.Space:
    """Return the space that ``space_to_json`` described.

    Raises:
      UsageError: It does not describe a space that an environment can have.
    """
    try:
        if _num_numbers(record) > LARGEST_SPACE:
            raise ValueError(f"more than {LARGEST_SPACE} numbers")
        space = _space(record)
        if space_to_json(space) != record:
            raise ValueError(f"it would be read as {space}")
    except Exception as error:  # Gymnasium and NumPy may raise any
        raise UsageError(
            f"{shown(record)} does not describe a space ({text_of(error)}); restore the file, or "
            "train again"
        ) from error
    return space


def _num_numbers(record: Mapping[str, Any]) -> int:
    """Return how many numbers an observation has in all boxes together."""
    if record["type"] == "Dict":
        return sum(map(_num_numbers, record["spaces"].values()))
    return math.prod(record["shape"]) if record["type"] == "Box" else 0


def _space(record: Mapping[str, Any]) -> gymnasium.Space:
    match record["type"]:
        case "Dict":
            return spaces.Dict({name: _space(part) for name, part in record["spaces"].items()})
        case "Box":
            dtype, shape = np.dtype(record["dtype"]), tuple(record["shape"])
            low, high = (_bound_from_json(record[k], dtype, shape) for k in ("low", "high"))
            return spaces.Box(low, high, shape, dtype.type)
        case "Discrete":
            return spaces.Discrete(record["n"], start=record["start"], dtype=record["dtype"])
        case "MultiDiscrete":
            dtype = np.dtype(record["dtype"])
            return spaces.MultiDiscrete(
                np.array(record["nvec"]), dtype=dtype.type, start=np.array(record["start"])
            )
        case "MultiBinary":
            return spaces.MultiBinary(record["n"])
    raise ValueError(f"its type {shown(record['type'])} is unknown")


def _bound_to_json(bound: np.ndarray) -> Any:
    """Return a bound as one value where all are equal; infinities as words, as JSON has none."""
    same = bound.size > 0 and bool((bound == bound.flat[0]).all())
    values = bound.flat[0].item() if same else bound.ravel().tolist()
    if isinstance(values, list):
        return [v if np.isfinite(v) else str(v) for v in values]
    return values if np.isfinite(values) else str(values)


def _bound_from_json(values: Any, dtype: np.dtype, shape: tuple[int, ...]) -> np.ndarray:
    if isinstance(values, list):
        values = [float(v) if isinstance(v, str) else v for v in values]
        return np.array(values, dtype).reshape(shape)
    return np.full(shape, float(values) if isinstance(values, str) else values, dtype)
