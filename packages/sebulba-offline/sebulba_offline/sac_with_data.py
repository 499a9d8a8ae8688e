"""SAC whose replay begins with a data set, as in RLPD (Ball et al. 2023, arXiv 2302.02948).

The share of data in each batch is that of RLPD; its layer normalisation and its ten critics are not
here.
"""

from __future__ import annotations

from sebulba.agents.sac import SAC
from sebulba.types import EnvSpec
from sebulba_offline.configs import SACWithDataConfig
from sebulba_offline.learning import LearnsFromData


class SACWithData(LearnsFromData, SAC):
    """SAC; each batch has a share of data."""

    config: SACWithDataConfig

    def __init__(self, spec: EnvSpec, config: SACWithDataConfig) -> None:
        super().__init__(spec, config)
        self.hold_data()
