"""SAC or DQN of another library, trained a short while whenever a line comes in.

``benchmarks rivals`` runs this file by the Python of that library's environment, so it imports
nothing of this package. Its argument is JSON: ``library``, ``algorithm``, ``env_id``, ``num_envs``
and ``options`` of the algorithm. It prints ``ready`` and the library's version; then each line that
it reads, a number of seconds, is answered by a line of JSON.
"""

from __future__ import annotations

import importlib
import json
import sys
import time
import warnings
from typing import Any


def main() -> None:
    """Make the algorithm, and train as lines come in."""
    warnings.filterwarnings("ignore")
    given = json.loads(sys.argv[1])
    library = importlib.import_module(given["library"])
    gymnasium = importlib.import_module("gymnasium")
    vec_env = importlib.import_module("stable_baselines3.common.vec_env")
    envs = vec_env.DummyVecEnv([lambda: gymnasium.make(given["env_id"])] * given["num_envs"])
    algorithm = getattr(library, given["algorithm"])("MlpPolicy", envs, **given["options"])
    print("ready", library.__version__, flush=True)
    for line in sys.stdin:
        print(json.dumps(measure(algorithm, float(line))), flush=True)


def measure(algorithm: Any, seconds: float) -> dict[str, float]:
    """Train for some seconds, between two ends of a collection of environment steps.

    Returns:
      Environment steps, updates, wall seconds and CPU seconds of all threads.
    """
    callbacks = importlib.import_module("stable_baselines3.common.callbacks")
    marks = []

    class Until(callbacks.BaseCallback):  # type: ignore[name-defined]
        """Notes where a collection begins, and ends the training."""

        def _on_rollout_start(self) -> None:
            counts = algorithm.num_timesteps, algorithm._n_updates
            marks.append((*counts, time.perf_counter(), time.process_time()))

        def _on_step(self) -> bool:
            return len(marks) < 3 or marks[-1][2] - marks[0][2] < seconds

    algorithm.learn(10**9, callback=Until(), log_interval=10**9, reset_num_timesteps=False)
    names = ("env_steps", "updates", "wall_s", "cpu_s")
    return dict(zip(names, (b - a for a, b in zip(marks[0], marks[-1], strict=True)), strict=True))


if __name__ == "__main__":
    main()
