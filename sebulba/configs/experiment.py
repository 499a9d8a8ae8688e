"""What describes a run: typed, frozen, checked on construction, and free of JAX.

The command line parses these before JAX is imported, so that a wrong option ends at once.
"""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import math
import os
from collections.abc import Mapping
from typing import Any, ClassVar, Literal, TypeAlias

from sebulba.agents.configs import AgentConfig, MultiAgentConfig, OptimizerConfig
from sebulba.agents.configs.network_and_optimizer import own_torsos
from sebulba.errors import UsageError, shown
from sebulba.options import (
    ENV_LIBRARIES,
    MOST_EPISODE_STEPS,
    SUBTRACT_OFFSET,
    CheckpointOptions,
    LoopOptions,
)
from sebulba.support import plugins
from sebulba.support.checks import (
    at_least,
    at_most,
    check_types,
    require,
    require_number,
    require_positive,
)
from sebulba.support.user_code import is_attribute

PATH_CHARACTERS = frozenset("/\\.~:")
"""An option without any of these names no module, and a file only in the current folder."""

MOST_SHOWN = 80
"""Characters of an id that is shown as it is."""

OptionValue: TypeAlias = bool | int | float | str

MOST_ANNEALED_CYCLES = 10**8
"""Most cycles of a run with a falling learning rate: its updates are counted cycle by cycle before
it begins."""


@dataclasses.dataclass(frozen=True)
class EnvConfig:
    """An environment. None leaves an option to the backend's own default."""

    id: str
    """Id of envpool or Gymnasium; gymnax:ID, or one of brax, playground, jumanji, pgx, jaxmarl or
    pettingzoo; or module:attribute of an environment class or factory."""
    backend: Literal["envpool", "gymnasium"] | None = None
    """None: envpool if it has the id, otherwise Gymnasium."""
    num_threads: int | None = None
    """Threads of an Inferencer's envpool. None: chosen by environment family."""
    vectorization: Literal["sync", "async"] = "sync"
    """sync: Gymnasium environments run in this process. async: each runs in its own process."""
    episodic_life: bool | None = None
    """Atari: a lost life is terminal for the learner, but does not end the reported episode."""
    reward_clip: bool | None = None
    """Atari: the learner sees the sign of the reward."""
    noop_max: int | None = None
    """Atari: at most this many no-op actions after a reset."""
    frame_skip: int | None = None
    """Atari: frames of the game per environment step."""
    stack_num: int | None = None
    """Atari: frames in an observation."""
    max_episode_steps: int | None = None
    """Truncate episodes after this many environment steps."""
    channels_first: bool | None = None
    """Images are channels x height x width, not height x width x channels. None: last, except for
    stacks of pixels such as 4 x 84 x 84."""
    action_mask: Literal["observation", "info"] | None = None
    """Where the mask of legal actions is: in the part action_mask of the observation, or in the
    infos of Gymnasium environments. Agents then take legal actions only."""
    privileged: tuple[str, ...] = ()
    """Parts of the observation that only the learner sees, such as a central critic; the policy
    does not."""
    wrappers: tuple[str, ...] = ()
    """Wrappers around single Gymnasium environments, the first innermost: module:attribute, or with
    arguments, in quotes, "gymnasium.wrappers:FrameStackObservation(stack_size=4)"."""
    options: dict[str, OptionValue] = dataclasses.field(default_factory=dict)
    """More options of envpool.make or gymnasium.make, as NAME VALUE pairs. Write a tuple, a list or
    a dict as in Python, in quotes: frame_bound "(50, 350)"."""

    def __post_init__(self) -> None:
        """Check what can be checked without the environment.

        Raises:
          UsageError: An empty id, or an option given twice.
        """
        check_types(self, "env.")
        if not self.id.strip():
            raise UsageError("env.id='' must name an environment; use an id such as CartPole-v1")
        twice = sorted(set(self.options) & {field.name for field in dataclasses.fields(self)})
        if twice:
            raise UsageError(
                f"env.options names {twice[0]}, which has an option of its own; "
                f"use --env.{twice[0].replace('_', '-')}"
            )

    def factory_arguments(self) -> dict[str, Any]:
        """Return the keyword arguments of ``sebulba.make_env_factory`` and ``sebulba.env_spec``."""
        values = {
            field.name: getattr(self, field.name)
            for field in dataclasses.fields(self)
            if field.name not in ("id", "options")
        }
        options = {name: _literal(value) for name, value in self.options.items()}
        return {k: v for k, v in values.items() if v not in (None, ())} | options

    def named_code(self) -> list[str]:
        """Return what of it imports Python code, or may open files, beyond a backend's own ids."""
        library, colon, _ = self.id.partition(":")
        is_plain = self.id.isprintable() and len(self.id) <= MOST_SHOWN
        shown_id = self.id if is_plain else shown(self.id)
        is_known = library in ENV_LIBRARIES or plugins.env_entry(self.id) is not None
        names_code = colon and not is_known
        named = [f"the environment {shown_id}"] if names_code else []
        wrappers = [one for one in self.wrappers if one.partition("(")[0] != SUBTRACT_OFFSET]
        named += [f"the wrapper {shown(wrapper)}" for wrapper in wrappers]
        return named + [
            f"the option {name} {value!r}"
            for name, value in self.options.items()
            if isinstance(value, str) and (set(value) & PATH_CHARACTERS or os.path.lexists(value))
        ]


def _literal(value: OptionValue) -> Any:
    """Return what a tuple, a list or a dict in Python's words is; other values as they are."""
    if isinstance(value, str) and value[:1] in ("(", "[", "{"):
        with contextlib.suppress(SyntaxError, ValueError, TypeError, MemoryError, RecursionError):
            return ast.literal_eval(value)
    return value


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExperimentConfig(LoopOptions):
    """A training run: what is trained, for how long, and how the loop runs.

    Raises:
      UsageError: A value breaks a rule that can be checked without JAX.
    """

    env: EnvConfig
    """Environment."""
    agent: AgentConfig
    """Hyper-parameters of the agent; their class chooses the algorithm."""
    agent_class: str | None = None
    """Your own agent, as module:class; None: the agent of the hyper-parameters. On the command line
    it is --agent module:class."""
    total_env_steps: int
    """Environment steps to train for, rounded up to whole cycles."""
    num_envs: int = 64
    """Environments per Inferencer of each host; a multiple of the number of its update devices."""
    steps_per_cycle: int = 32
    """Environment steps in a trajectory (the unroll length)."""
    anneal_learning_rate: bool = False
    """Let the learning rate fall linearly to 0 over the run. To train longer afterwards, set
    extension_learning_rate."""
    anneal_env_steps: int | None = None
    """Environment steps over which the learning rate falls, in a run with an
    extension_learning_rate; sebulba resume sets it. None: total_env_steps."""
    extension_learning_rate: float | None = None
    """Learning rate after the fall to 0, for a run that is resumed with more total_env_steps. All
    learning rates of the agent are scaled alike."""
    eval_every_env_steps: int = 0
    """Environment steps between evaluations, which play the evaluation policy in a thread of their
    own, and at the end of a run that was not stopped. The best policy is kept. 0: never."""
    eval_episodes: int = 50
    """Complete episodes per evaluation."""
    eval_num_envs: int = 25
    """Environments of an evaluation."""
    eval_max_episode_steps: int = MOST_EPISODE_STEPS
    """Steps after which an evaluation cuts an episode. It counts with its return so far, and its
    environment plays no other in that evaluation."""
    video_every_env_steps: int = 0
    """Environment steps between films of the evaluation policy, in videos/ of the run folder; each
    is made after the next evaluation. 0: never."""
    writers: tuple[str, ...] = ("tensorboard",)
    """Writers of metrics besides metrics.jsonl: tensorboard, wandb, mlflow, an entry point of the
    group sebulba.writers, or your own as module:attribute. No name: only metrics.jsonl."""
    stop_at_return: float | None = None
    """End the run when its return reaches this: the return of an evaluation or, without
    evaluations, the mean of the last 100 training episodes."""
    callbacks: tuple[str, ...] = ()
    """Your own functions, as module:attribute, called with every record of metrics. A returned
    sentence ends the run, as its reason. A class is first made without arguments."""
    record_dataset: str | None = None
    """Folder of a data set into which the episodes of training are recorded; a run that is resumed
    adds to it. Needs the package sebulba-offline."""
    from_run: str | None = None
    """Folder of a run whose networks, and statistics of normalisation, a new run begins with. The
    agent and the spaces of its environment are to be the same. On the command line also --from."""
    checkpoint: CheckpointOptions = CheckpointOptions()
    """When the run is saved."""
    resume: bool = False
    """Resume from the newest checkpoint if the folder holds a run; otherwise begin one."""
    drop_replay: bool = False
    """When resuming, begin with an empty replay if the saved one does not fit."""
    strict: bool = False
    """When resuming, refuse to skip a damaged checkpoint."""
    trust: bool = False
    """Run the Python code that an untrusted run folder or configuration file names, and open its
    pickles. Files that your own key signed do not need it."""
    platform: Literal["cpu", "cuda", "tpu"] | None = None
    """Platform of JAX; None: the best available."""
    num_cpu_devices: int | None = None
    """Split the CPU into this many devices; all update, the first infers. None: split it over its
    cores for the torsos nature_cnn and impala_resnet, if no devices are given. 1: do not split."""
    compile_cache: str = "auto"
    """Folder that keeps compiled programs for the next start; off: none. auto:
    $JAX_COMPILATION_CACHE_DIR, or sebulba/jax in $XDG_CACHE_HOME or ~/.cache."""
    name: str | None = None
    """Name of the folder under runs/; None: preset, time and process."""
    run_dir: str | None = None
    """Folder of the run, instead of runs/NAME."""

    open_fields: ClassVar[tuple[str, ...]] = ("agent",)
    """An agent of one's own may have any configuration."""

    def __post_init__(self) -> None:
        """Check every field."""
        if not dataclasses.is_dataclass(self.agent) or isinstance(self.agent, type):
            raise UsageError(
                f"agent={shown(self.agent)} must be the hyper-parameters of an agent; use for "
                "example ImpalaConfig()"
            )
        super().__post_init__()
        if isinstance(self.agent, AgentConfig):
            object.__setattr__(self, "agent", self.agent.fitted(self.num_envs))
        if self.agent_class is not None:
            use = "use for example my_package.agents:MyAgent"
            is_name = is_attribute(self.agent_class)
            require(
                is_name, "agent", self.agent_class, "must be 'module:class' or 'FILE.py:class'", use
            )
        for count in (
            *("total_env_steps", "anneal_env_steps", "num_envs", "steps_per_cycle"),
            *("eval_episodes", "eval_num_envs", "eval_max_episode_steps", "num_cpu_devices"),
        ):
            at_least(1, count, getattr(self, count))
        at_least(0, "eval_every_env_steps", self.eval_every_env_steps)
        at_least(0, "video_every_env_steps", self.video_every_env_steps)
        require(
            not self.video_every_env_steps or self.eval_every_env_steps > 0,
            "video_every_env_steps",
            self.video_every_env_steps,
            "needs evaluations, but eval_every_env_steps is 0",
            f"use --eval-every-env-steps {self.video_every_env_steps}",
        )
        for writer in self.writers:
            is_name = is_attribute(writer) or (writer.strip() != "" and ":" not in writer)
            use = "use for example wandb or my_package:MyWriter"
            rule = "must be a name, 'module:attribute' or 'FILE.py:attribute'"
            require(is_name, "writers", writer, rule, use)
            twice = self.writers.count(writer) > 1
            require(not twice, "writers", writer, "is given twice", "leave one out")
        for callback in self.callbacks:
            rule = "must be 'module:attribute' or 'FILE.py:attribute'"
            require(
                is_attribute(callback), "callbacks", callback, rule, "use my_package:my_callback"
            )
        if self.stop_at_return is not None:
            require_number("stop_at_return", self.stop_at_return, -math.inf, math.inf, "use 475")
        require(
            self.num_cpu_devices is None or self.platform in (None, "cpu"),
            "num_cpu_devices",
            self.num_cpu_devices,
            f"splits the CPU, but platform={self.platform}",
            "use platform=cpu, or leave one of them out",
        )
        self._check_learning_rates()
        has_folder = self.name is not None or self.run_dir is not None
        require(
            not self.resume or has_folder,
            "resume",
            self.resume,
            "needs the folder of the run",
            "give --name NAME or --run-dir DIR",
        )
        name = self.name
        require(
            not self.distributed.is_on or has_folder,
            "run_dir",
            None,
            f"is needed with distributed.coordinator={shown(self.distributed.coordinator)}: all "
            "hosts save into one shared folder",
            "give --run-dir DIR, or --name NAME if they share the folder runs/",
        )
        is_folder = name is None or (name.strip() not in ("", ".", "..") and "/" not in name)
        require(
            is_folder, "name", name, "must be one folder name", "use --run-dir for another place"
        )

    def _check_learning_rates(self) -> None:
        rate = self.extension_learning_rate
        if rate is not None:
            require_positive("extension_learning_rate", rate, "use a tenth of the learning rate")
            has_rates = all(hasattr(agent, "learning_rate") for agent in self.members().values())
            require(
                self.anneal_learning_rate and has_rates,
                "extension_learning_rate",
                rate,
                "needs anneal_learning_rate=True, and agents with a learning_rate",
                "leave it out",
            )
        require(
            self.record_dataset is None or not self.distributed.is_on,
            "record_dataset",
            self.record_dataset,
            "needs a run on one host",
            "leave it out",
        )
        require(
            self.anneal_env_steps is None or rate is not None,
            "anneal_env_steps",
            self.anneal_env_steps,
            "needs a learning rate after the fall",
            "give an extension_learning_rate",
        )
        if self.anneal_learning_rate:
            for agent in self.members().values():
                _optimizer_of(agent)
            at_most(
                MOST_ANNEALED_CYCLES,
                "total_env_steps / num_envs / steps_per_cycle",
                self.annealed_cycles,
            )

    @property
    def agent_name(self) -> str:
        """The agent, as ``module:class``."""
        return str(self.agent_class or getattr(self.agent, "agent_class", ""))

    @property
    def annealed_env_steps(self) -> int:
        """Environment steps over which the learning rate falls, where it does."""
        return self.anneal_env_steps or self.total_env_steps

    @property
    def annealed_cycles(self) -> int:
        """Trajectories over which the learning rate falls, where it does."""
        return self._cycles(self.annealed_env_steps, 1)

    def named_code(self) -> list[str]:
        """Return what of it imports or runs code, or reads or writes files, that it names."""
        named = [] if self.agent_class is None else [f"the agent {self.agent_class}"]
        named += [f"the network {name}" for name in own_torsos(self.agent)]
        if isinstance(self.agent, MultiAgentConfig):
            named += self.agent.named_code()
        named += self.env.named_code()
        named += [f"the writer {name}" for name in self.writers if name != "tensorboard"]
        named += [f"the callback {name}" for name in self.callbacks]
        if self.compile_cache not in ("auto", "off"):
            named.append(f"the compiled programs in {self.compile_cache}")
        folders = filter(None, (self.run_dir, self.record_dataset))
        return named + [f"the folder {folder}" for folder in folders]

    def num_cycles(self, num_inferencers: int, done_env_steps: int = 0) -> int:
        """Return the trajectories that what is left of ``total_env_steps`` takes.

        In lockstep they come in whole rounds, one trajectory from each Inferencer.
        """
        return self._cycles(max(0, self.total_env_steps - done_env_steps), num_inferencers)

    def _cycles(self, env_steps: int, num_inferencers: int) -> int:
        return self.whole_cycles(env_steps, self.num_envs * self.steps_per_cycle, num_inferencers)

    def members(self) -> Mapping[str, AgentConfig]:
        """Return the hyper-parameters of who learns: of one agent, under the name ""."""
        return self.agent.agents if isinstance(self.agent, MultiAgentConfig) else {"": self.agent}

    def agent_for(self, num_updates: int | Mapping[str, int]) -> AgentConfig:
        """Return the agent's hyper-parameters, with which its learning rate falls if it is to.

        Args:
          num_updates: Over how many updates; of many agents, by their names in the configuration.
        """
        if not self.anneal_learning_rate:
            return self.agent
        rate = None if self.anneal_env_steps is None else self.extension_learning_rate
        annealed: dict[str, Any] = {}
        for name, agent in self.members().items():
            optimizer = dataclasses.replace(
                _optimizer_of(agent),
                schedule="linear",
                schedule_updates=max(
                    1, num_updates if isinstance(num_updates, int) else num_updates[name]
                ),
                share_after_schedule=0.0 if rate is None else rate / agent.learning_rate,  # type: ignore[attr-defined]
            )
            annealed[name] = dataclasses.replace(agent, optimizer=optimizer)  # type: ignore[call-arg]
        if isinstance(self.agent, MultiAgentConfig):
            return dataclasses.replace(self.agent, agents=annealed)
        return annealed[""]


def _optimizer_of(agent: AgentConfig) -> OptimizerConfig:
    """Return how gradients of the agent become updates.

    Raises:
      UsageError: The agent does not say it in a field of that name.
    """
    optimizer = getattr(agent, "optimizer", None)
    if isinstance(optimizer, OptimizerConfig):
        return optimizer
    raise UsageError(
        f"anneal_learning_rate=True needs a field optimizer: OptimizerConfig, which "
        f"{type(agent).__name__} has not; leave it out, or give the agent such a field"
    )
