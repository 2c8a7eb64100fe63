from __future__ import annotations

import pytest

from tests.simulation.mutations import MUTATIONS, Mutation, find


@pytest.mark.once
@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.says)
def test_a_planted_fault_is_found(mutation: Mutation) -> None:
    ended = find(mutation)
    assert ended is not None, f"no invariant failed although {mutation.says}"
    assert ended.broken.startswith(mutation.found_by)
    assert f"python -m tests.simulation --seed {ended.schedule.seed} " in str(ended)
