from __future__ import annotations

import pytest

from tests.simulation.mutations import MUTATIONS, find
from tests.simulation.planting import Mutation


@pytest.mark.once
@pytest.mark.long
@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.says)
def test_a_planted_fault_is_found(mutation: Mutation) -> None:
    ended = find(mutation)
    assert ended is not None, f"{mutation.found_by!r} held although {mutation.says}"
    assert f"python -m tests.simulation --seed {ended.schedule.seed} " in str(ended)
