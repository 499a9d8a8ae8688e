"""Ready experiments with many agents in JAX alone: cooperation, and games of two players."""

from __future__ import annotations

from sebulba.agents.configs import TorsoConfig
from sebulba.configs.experiment import ExperimentConfig
from sebulba.configs.ppo_presets import neutral
from sebulba.configs.preset import Presets, for_task

PRESETS = Presets()


@PRESETS.add("simple-spread", "PPO, a policy for all, jaxmarl simple_spread", goal=-21.5)
def simple_spread() -> ExperimentConfig:
    """Return PPO for three agents who cover three landmarks, which needs the extra ``jaxmarl``.

    IPPO (de Witt et al. 2020, arXiv 2011.09533): all agents share a policy that sees what one agent
    observes. Lambda, clip, entropy, epochs, minibatches and the length of trajectories are those of
    JaxMARL's baseline for MPE (Rutherford et al. 2023, ippo_ff_mpe.yaml); learning rate and
    discount fit a tenth of its steps. Rewards are normalised, since those of a far landmark and of
    a collision differ in size. One Inferencer in lockstep.
    """
    agent = {
        "learning_rate": 1e-3,
        "discount": 0.95,
        "epochs": 4,
        "minibatches": 4,
        "entropy_coefficient": 0.01,
        "normalize_observations": False,
        "torso": TorsoConfig(hidden_sizes=(128, 128)),
    }
    return for_task(neutral(), "jaxmarl:MPE_simple_spread_v3", agent, num_envs=32)


@PRESETS.add("simple-spread-mappo", "PPO, a central critic, jaxmarl simple_spread", goal=-21.5)
def simple_spread_mappo() -> ExperimentConfig:
    """Return ``simple-spread`` with a central critic, which needs the extra ``jaxmarl``.

    MAPPO (Yu et al. 2021, arXiv 2103.01955): values see what all three agents observe, the policy
    what its own agent does. All else is as in ``simple-spread``, so that the two can be compared.
    """
    spread = simple_spread()
    return for_task(spread, spread.env, {"central_critic": True})


@PRESETS.add("speaker-listener", "PPO, a policy for each, jaxmarl speaker and listener", goal=-10)
def speaker_listener() -> ExperimentConfig:
    """Return PPO for a speaker and a listener, who differ, which needs the extra ``jaxmarl``.

    Each has a policy of its own, with the settings of ``simple-spread`` but for what a language
    needs. As long as words mean nothing the listener does not listen, and as long as it does not
    listen no word is better than another; a large entropy bonus keeps words random, and no language
    begins. Without one it begins with two words for three landmarks, and the third is never said
    again; so there is a small one, a learning rate that stays, and twice as many updates. What a
    word does is small beside where the landmarks happen to be, so values see both observations (a
    central critic; MAPPO, Yu et al. 2021, arXiv 2103.01955) and lambda is smaller. The speaker sees
    0.65 for the landmark that is meant and 0.15 for others, which is nearly the same unless
    observations are normalised.
    """
    agent = {
        "trace_decay": 0.8,
        "entropy_coefficient": 0.003,
        "normalize_observations": True,
        "central_critic": True,
    }
    env = "jaxmarl:MPE_simple_speaker_listener_v4"
    return for_task(simple_spread(), env, agent, anneal_learning_rate=False, steps_per_cycle=64)


@PRESETS.add("connect-four-pgx", "PPO against itself, pgx connect_four")
def connect_four() -> ExperimentConfig:
    """Return PPO against itself in pgx's Connect Four, which needs the extra ``pgx``.

    Both seats share the policy, so the opponent always is the latest. Settings are those of
    ``simple-spread`` but for what a game changes: a discount near 1, since the reward comes at the
    end, and rewards as they are, which are 1, 0 and -1.
    """
    agent = {
        "discount": 0.99,
        "normalize_rewards": False,
        "entropy_coefficient": 0.02,
        "torso": TorsoConfig(hidden_sizes=(256, 256), activation="relu"),
    }
    env_steps = 3_000_000
    return for_task(
        simple_spread(), "pgx:connect_four", agent, num_envs=64, total_env_steps=env_steps
    )
