"""What each agent has to learn, and within which budget. Free of JAX."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

from benchmarks.studies.learn import Goal
from sebulba.configs.presets import PRESETS

_OFTEN = ("--metrics-interval-s", "0.1")
"""Options for presets that train 200,000 env steps in half a second."""

_SB3_ZOO = "Stable-Baselines3 with its zoo's settings"


def _reach(preset: str, env_steps: int, **more: Any) -> Goal:
    """Return the goal to reach the mean return that the preset names."""
    episode_return_mean = PRESETS[preset].goal
    assert episode_return_mean is not None, preset
    return Goal(preset, episode_return_mean, env_steps, **more)


_ZOO_TABLE = "rl-baselines3-zoo, benchmark.md"


def _zoo(preset: str, episode_return_mean: float, env_steps: int, every: int, row: str) -> Goal:
    """Return a goal by a row of the zoo; ``every`` is env steps from evaluation to evaluation."""
    return Goal(
        preset,
        episode_return_mean,
        env_steps,
        options=("--eval-every-env-steps", str(every), "--eval-episodes", "50"),
        reference=f"{_ZOO_TABLE}, {row}",
    )


_CLEANRL = "CleanRL, docs/benchmark/ppo_continuous_action.md"
_TD3_PAPER = "Fujimoto et al. 2018 (arXiv 1802.09477), table 1"
_OPTIMUM_OF_LAKE = "0.744 is the best possible (dynamic programming), 0.014 a random policy's"
_OPTIMUM_OF_CATCH = "1 is the best possible"
_OWN_FIGURE = "no published figure was found"
_SBX = f"{_OWN_FIGURE}; SAC of sbx 0.28.0 at its defaults, measured here, two seeds"


class _Task(NamedTuple):
    """What is known of a task for one agent."""

    env_id: str
    """Argument of ``--env.id``."""
    env_steps: int
    """Environment steps to train for; ``reference`` says if others took more, or fewer."""
    episode_return_mean: float
    """The return that was published, or is the best possible."""
    reference: str
    """Who measured it."""
    eval_episodes: int = 50
    """Episodes in an evaluation: more where returns vary much and episodes are short."""

    @property
    def random_return_mean(self) -> float | None:
        """Mean return of uniformly random actions; None where it was not measured."""
        return _RANDOM_RETURNS.get(self.env_id)


_MEMORY_TASKS = "sebulba.envs.memory_tasks"
_RANDOM_RETURNS = {
    "Acrobot-v1": -500,
    "Catch-v0": -0.594,
    "FrozenLake-v1": 0.0135,
    "MountainCar-v0": -200,
    "Hopper-v4": 17.73,
    "Walker2d-v4": 2.633,
    "InvertedDoublePendulum-v4": 57.17,
    "LunarLander-v3": -184.7,
    "LunarLanderContinuous-v3": -211.1,
    "BipedalWalker-v3": -102.6,
    "Ant-v4": -89.07,
    "Swimmer-v4": 0.8697,
    "InvertedPendulum-v4": 6.15,
    "Reacher-v4": -43.56,
    "Pusher-v4": -149.1,
    "Humanoid-v4": 124.7,
    "MountainCarContinuous-v0": -33.25,
    "HumanoidStandup-v4": 33941,
    f"{_MEMORY_TASKS}:acrobot_without_velocities": -500,
    f"{_MEMORY_TASKS}:RepeatObservation": 27.53,
}
"""Mean returns of uniformly random actions by environment id, in Sebulba's own environments
(``sebulba.envs.single_env.SingleEnv``, ``action_space.seed(0)`` and ``sample()``): over 100
episodes, but 2,000 of Catch and FrozenLake, and 64 of HumanoidStandup."""

_ON_POLICY_TASKS = {
    "acrobot": _Task("Acrobot-v1", 1_000_000, -73.5, f"{_ZOO_TABLE}, PPO: -73.5", 200),
    "catch": _Task("Catch-v0", 300_000, 1.0, _OPTIMUM_OF_CATCH),
    "frozenlake": _Task("FrozenLake-v1", 300_000, 0.744, _OPTIMUM_OF_LAKE, 400),
    "mountaincar": _Task("MountainCar-v0", 1_000_000, -110.4, f"{_ZOO_TABLE}, PPO: -110.4"),
    "hopper": _Task(
        "Hopper-v4", 1_000_000, 2383, f"{_CLEANRL}: 2383; {_ZOO_TABLE}, PPO, tuned, v3: 2410"
    ),
    "walker2d": _Task(
        "Walker2d-v4", 1_000_000, 2288, f"{_CLEANRL}: 2288; {_ZOO_TABLE}, PPO, tuned, v3: 3479"
    ),
    "doublependulum": _Task(
        "InvertedDoublePendulum-v4", 1_000_000, 8978, f"{_TD3_PAPER}, PPO: 8978"
    ),
}
_MORE_PPO_TASKS = {
    "lunarlander": _Task("LunarLander-v3", 1_000_000, 242.1, f"{_ZOO_TABLE}, PPO, v2: 242.1"),
    "lunarlandercontinuous": _Task(
        "LunarLanderContinuous-v3", 1_000_000, 270.9, f"{_ZOO_TABLE}, PPO, v2: 270.9"
    ),
    "bipedalwalker": _Task("BipedalWalker-v3", 5_000_000, 213.3, f"{_ZOO_TABLE}, PPO: 213.3"),
    "ant": _Task("Ant-v4", 1_000_000, 1327, f"{_ZOO_TABLE}, PPO, v3: 1327"),
    "swimmer": _Task("Swimmer-v4", 1_000_000, 281.6, f"{_ZOO_TABLE}, PPO, tuned, v3: 281.6"),
    "invertedpendulum": _Task(
        "InvertedPendulum-v4", 1_000_000, 1000, f"{_TD3_PAPER}, PPO, v1: 1000"
    ),
    "reacher": _Task("Reacher-v4", 1_000_000, -6.18, f"{_TD3_PAPER}, PPO, v1: -6.18", 200),
    "pusher": _Task("Pusher-v4", 1_000_000, -40.4, f"{_CLEANRL}: -40.4"),
    "humanoid": _Task("Humanoid-v4", 1_000_000, 716, f"{_CLEANRL}: 716"),
    "mountaincarcontinuous": _Task(
        "MountainCarContinuous-v0", 1_000_000, 88.3, f"{_ZOO_TABLE}, PPO, tuned, at 20k: 88.3"
    ),
    "humanoidstandup": _Task(
        "HumanoidStandup-v4",
        1_000_000,
        146_645,
        f"{_SB3_ZOO}, PPO, v2, at 10M: the median of five policies (huggingface.co/qgallouedec)",
    ),
}
_TASKS: dict[str, dict[str, _Task]] = {
    "ppo": {**_ON_POLICY_TASKS, **_MORE_PPO_TASKS},
    "impala": {
        name: task._replace(env_steps=3 * task.env_steps) for name, task in _ON_POLICY_TASKS.items()
    },
    "dqn": {
        "acrobot": _Task("Acrobot-v1", 100_000, -76.6, f"{_ZOO_TABLE}, DQN: -76.6", 200),
        "catch": _Task("Catch-v0", 100_000, 1.0, _OPTIMUM_OF_CATCH),
        "frozenlake": _Task("FrozenLake-v1", 100_000, 0.744, _OPTIMUM_OF_LAKE, 400),
        "mountaincar": _Task("MountainCar-v0", 120_000, -100.8, f"{_ZOO_TABLE}, DQN: -100.8"),
        "lunarlander": _Task("LunarLander-v3", 100_000, 154.4, f"{_ZOO_TABLE}, DQN, v2: 154.4"),
    },
    "r2d2": {
        "acrobot": _Task(
            f"{_MEMORY_TASKS}:acrobot_without_velocities",
            1_000_000,
            -76.6,
            f"{_OWN_FIGURE}; {_ZOO_TABLE}, DQN with velocities: -76.6",
        ),
        "repeat": _Task(
            f"{_MEMORY_TASKS}:RepeatObservation", 300_000, 56, "56 is the best possible"
        ),
    },
    "sac": {
        "hopper": _Task("Hopper-v4", 100_000, 862, f"{_SBX}: 827, 897"),
        "walker2d": _Task("Walker2d-v4", 100_000, 710, f"{_SBX}: 407, 1014"),
    },
    "ddpg": {
        "doublependulum": _Task(
            "InvertedDoublePendulum-v4", 100_000, 8370, f"{_TD3_PAPER}, DDPG at 1M: 8370"
        ),
    },
}
"""What neutral presets are judged by: tasks by the preset's name."""


def _neutral(preset: str, task: _Task) -> Goal:
    """Return the goal to come within 10 % of the known return, with nothing typed but the task."""
    return Goal(
        preset,
        round(task.episode_return_mean - 0.1 * abs(task.episode_return_mean), 3),
        task.env_steps,
        options=(
            *("--env.id", task.env_id, "--total-env-steps", str(task.env_steps)),
            *("--eval-every-env-steps", str(task.env_steps // 10)),
            *("--eval-episodes", str(task.eval_episodes)),
        ),
        reference=task.reference,
    )


_NEUTRAL = {
    f"neutral-{preset}-{name}": _neutral(preset, task)
    for preset, tasks in _TASKS.items()
    for name, task in tasks.items()
}
NEUTRAL_TASKS = {
    f"neutral-{preset}-{name}": task
    for preset, tasks in _TASKS.items()
    for name, task in tasks.items()
}
"""What is known of the tasks of neutral presets, by the name of the goal."""


def _congestion(agent: str) -> Goal:
    """Return the goal of 80 % of the way from one window for all networks to the best of each."""
    return Goal(
        f"congestion-{agent}",
        371,
        1_000_000,
        options=("--total-env-steps", "1000000", "--eval-every-env-steps", "100000"),
        reference="264: a window of 321 packets; 398: the best fixed window of each network",
    )


def _small_pong(agent: str, env_steps: int, *options: str) -> Goal:
    """Return the goal to win as many points of the small Pong as are lost, with Atari's preset."""
    words = (
        *("--env.id", "benchmarks.studies.small_pong:small_pong", "--agent.torso", "small_cnn"),
        *("--total-env-steps", str(env_steps)),
    )
    return Goal(
        f"atari-{agent}",
        0,
        env_steps,
        evaluated=False,
        options=(*words, *options),
        seeds=2,
        reference=f"{_OWN_FIGURE}; -21 to 21 are possible, untrained networks get -13",
    )


_MEMORIES = ("lstm", "gru", "lru", "gtrxl")
_POPGYM = "popgym, Morad et al. 2023 (arXiv 2303.01859), PPO, 15M env steps"
_MEMORY_GAMES = {
    "length-30": (
        _Task(
            "gymnax:MemoryChain-bsuite", 500_000, 1, "1 is the best possible; bsuite's memory_len"
        ),
        ("--env.options.memory-length", "30"),
    ),
    "t-maze-50": (
        _Task("benchmarks.studies.t_maze:TMaze", 1_000_000, 1, "1 is the best possible"),
        ("--env.options.length", "50"),
    ),
    "repeat-easy": (
        _Task("popgym:popgym-RepeatPreviousEasy-v0", 1_000_000, 1, f"{_POPGYM}, GRU: 1.00"),
        (),
    ),
}
"""What only a memory can do, with the options of the environment."""


def _memory(memory: str, task: _Task, options: tuple[str, ...]) -> Goal:
    """Return the goal to do by ``--agent.memory`` alone what needs a memory."""
    goal = _neutral("ppo", task)
    return dataclasses.replace(goal, options=(*goal.options, "--agent.memory", memory, *options))


def _replay_ratio(preset: str, env_id: str, goal: float, env_steps: int, num_envs: int) -> Goal:
    """Return the goal to learn the same from as many env steps, whatever the environments are."""
    return Goal(
        preset,
        goal,
        env_steps,
        options=(
            *("--env.id", env_id, "--num-envs", str(num_envs)),
            *("--total-env-steps", str(env_steps), "--eval-every-env-steps", str(env_steps // 10)),
        ),
        reference="the same with other numbers of environments",
    )


_SPEAKER_OPTIONS = ("--eval-every-env-steps", "50000", "--eval-episodes", "400")

GOALS: dict[str, Goal] = {
    "cartpole": _reach(
        "cartpole",
        600_000,
        evaluated=False,
        options=_OFTEN,
        reference="a prototype: 250k to 450k",
    ),
    "pendulum": _reach("pendulum", 3_000_000, evaluated=False),
    "cartpole-ppo": _reach(
        "cartpole-ppo",
        100_000,
        evaluated=False,
        seconds=5,
        options=_OFTEN,
        reference=f"{_SB3_ZOO} on 2 cores: 61k to 70k env steps, 15 to 20 s",
    ),
    "cartpole-dqn": _reach("cartpole-dqn", 100_000, reference=f"{_SB3_ZOO}: about 50k"),
    "pendulum-sac": _reach("pendulum-sac", 20_000, reference=f"{_SB3_ZOO}: -176"),
    "pendulum-ddpg": _reach("pendulum-ddpg", 20_000, reference=f"{_SB3_ZOO}, SAC: -176"),
    "cartpole-r2d2": _reach(
        "cartpole-r2d2",
        2_000_000,
        seconds=900,
        reference="a memoryless V-trace prototype: 50 over 30M",
    ),
    "cartpole-r2d2-memoryless": Goal(
        "cartpole-r2d2", 150, 2_000_000, is_limit=True, options=("--agent.lstm-size", "0")
    ),
    "repeat-r2d2": _reach(
        "repeat-r2d2", 1_000_000, reference="56 is the best possible; at most 5 % less"
    ),
    "repeat-r2d2-zero-state": Goal(
        "repeat-r2d2",
        50.4,
        1_000_000,
        is_limit=True,
        options=("--agent.no-stored-state",),
        reference="10 % below the best possible",
    ),
    "halfcheetah-ppo": _reach(
        "halfcheetah-ppo", 1_000_000, evaluated=False, reference="CleanRL: about 1.4k"
    ),
    "lunarlandercontinuous-ppo": _zoo(
        "lunarlandercontinuous-ppo", 243.81, 1_000_000, 100_000, "PPO, v2: 270.9"
    ),
    "mountaincarcontinuous-sac": _zoo(
        "mountaincarcontinuous-sac", 85.21, 30_000, 5_000, "SAC, tuned, at 50k: 94.68"
    ),
    "swimmer-ppo": _zoo("swimmer-ppo", 253.4, 1_000_000, 100_000, "PPO, tuned, v3: 281.6"),
    "qbert-ppo-42": Goal(
        "qbert-ppo",
        492,
        1_000_000,
        options=(
            *("--env.options.img-height", "42", "--env.options.img-width", "42"),
            *("--total-env-steps", "1000000"),
            *("--eval-every-env-steps", "100000", "--eval-episodes", "20"),
        ),
        seeds=1,
        reference="random play: 163.9 (Mnih et al. 2015), of which the goal is three times; "
        f"{_ZOO_TABLE}, PPO, 84 x 84, 10M: 15627",
    ),
    "breakout-minatar": _reach(
        "breakout-minatar",
        10_000_000,
        options=("--eval-every-env-steps", "1000000", "--eval-episodes", "200"),
        reference="gymnax's figure, of sampled actions: 28",
    ),
    "halfcheetah-sac": _reach(
        "halfcheetah-sac",
        300_000,
        options=("--total-env-steps", "300000"),
        seeds=1,
        reference="CleanRL: 9.6k at 1M",
    ),
    **{f"congestion-{agent}": _congestion(agent) for agent in ("ppo", "sac", "ddpg", "impala")},
    "kuhn": Goal(
        "kuhn",
        0.06,
        2_000_000,
        exam="NashConv of KuhnPoker-v1",
        is_limit=True,
        seconds=60,
        reference="0.917 with uniform actions",
    ),
    "leduc": Goal(
        "leduc",
        1.2,
        10_000_000,
        exam="NashConv of LeducHoldem-v1",
        is_limit=True,
        seconds=600,
        reference="4.747 with uniform actions; NFSP about 1.3",
    ),
    "kuhn-league": Goal(
        "kuhn-league",
        0.04,
        2_000_000,
        exam="NashConv of a league's history in KuhnPoker-v1",
        is_limit=True,
        seconds=60,
        reference="NFSP's 0.04 takes 1e7 episodes",
    ),
    "leduc-league": Goal(
        "leduc-league",
        0.6,
        10_000_000,
        exam="NashConv of a league's history in LeducHoldem-v1",
        is_limit=True,
        seconds=600,
        reference="4.747 with uniform actions; NFSP about 1.3",
    ),
    "tic-tac-toe": Goal(
        "tic-tac-toe",
        0,
        1_000_000,
        exam="lost positions of TicTacToe-v1",
        is_limit=True,
        reference="0 is the best possible",
    ),
    "tic-tac-toe-league": Goal(
        "tic-tac-toe-league",
        0,
        1_500_000,
        exam="lost positions of TicTacToe-v1",
        is_limit=True,
        reference="0 is the best possible",
    ),
    "connect-four": Goal("connect-four", 0.95, 20_000_000, exam="share won of ConnectFour-v1"),
    "connect-four-script": Goal(
        "connect-four", 0.8, 20_000_000, exam="share won of ConnectFour-v1 against a script"
    ),
    "lbf": _reach(
        "lbf",
        1_500_000,
        options=("--eval-every-env-steps", "250000", "--eval-episodes", "200"),
        reference="0.055 with random actions, of which the goal is ten times; 1 is the most",
    ),
    "simple-spread": _reach(
        "simple-spread",
        1_000_000,
        options=("--eval-every-env-steps", "250000", "--eval-episodes", "1000"),
        reference="-27.4 random, -7.9 a script; a prototype of 70 lines: -19.3 to -20.9",
    ),
    "simple-spread-mappo": _reach(
        "simple-spread-mappo",
        1_000_000,
        options=("--eval-every-env-steps", "250000", "--eval-episodes", "1000"),
        reference="as simple-spread, which has no central critic",
    ),
    "speaker-listener": _reach(
        "speaker-listener",
        1_000_000,
        options=_SPEAKER_OPTIONS,
        reference="-40 random, -33 standing still, -14.5 deaf, -6 hearing and greedy",
    ),
    "speaker-listener-words": Goal(
        "speaker-listener",
        8,
        1_000_000,
        exam="return lost by shuffled words",
        member="",
        options=_SPEAKER_OPTIONS,
    ),
    "small-pong-ppo": _small_pong("ppo", 300_000),
    "small-pong-impala": _small_pong("impala", 600_000),
    "small-pong-dqn": _small_pong("dqn", 300_000, "--agent.exploration-env-steps", "100000"),
    "small-pong-r2d2": _small_pong(
        "r2d2", 300_000, "--agent.lstm-size", "64", "--agent.head-hidden-sizes", "64"
    ),
    "doorkey-5x5": Goal(
        "ppo",
        0.9,
        300_000,
        seconds=300,
        options=(
            *("--env.id", "MiniGrid-DoorKey-5x5-v0", "--total-env-steps", "300000"),
            *("--eval-every-env-steps", "50000", "--eval-episodes", "200"),
        ),
        reference="about 0.97: the shortest way",
    ),
    **{
        f"memory-{name}-{memory}": _memory(memory, *game)
        for name, game in _MEMORY_GAMES.items()
        for memory in _MEMORIES
    },
    **{
        f"replay-ratio-{preset}-{num_envs}": _replay_ratio(preset, *task, num_envs)
        for preset, task in (
            ("dqn", ("CartPole-v1", 450, 50_000)),
            ("sac", ("Pendulum-v1", -200, 20_000)),
        )
        for num_envs in (1, 8, 64)
    },
    **_NEUTRAL,
}
"""Goals by the NAME of the result, ``learn-NAME.json``; it is mostly that of a preset."""

GROUPS: dict[str, tuple[str, ...]] = {
    "neutral": tuple(_NEUTRAL),
    **{
        group: tuple(name for name in GOALS if name.startswith(f"{group}-"))
        for group in ("small-pong", "memory", "replay-ratio")
    },
}
"""Names that stand for several goals."""
