"""Environments made of programs for ns-3."""

from __future__ import annotations

import pytest


@pytest.fixture
def make(request):
    """Make an environment by its options, of the module's ``PROGRAM`` unless another is given."""
    from sebulba_ns3 import Ns3Scenario

    made = []

    def make_one(source=request.module.PROGRAM, **options):
        made.append(Ns3Scenario(source, **options))
        return made[-1]

    yield make_one
    for env in made:
        env.close()
