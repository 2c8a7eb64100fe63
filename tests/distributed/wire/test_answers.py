from __future__ import annotations

import pytest

from dflow.distributed.wire.answers import expect
from dflow.distributed.wire.messages import Ok, Registered
from dflow.tracing.errors import WireError


def test_another_answer_than_was_asked_for_names_who_gave_it_and_the_remedy() -> None:
    assert expect(Registered(3), Registered, "ps:0").handle == 3
    with pytest.raises(
        WireError, match="ps:0 answered with Ok where Registered was due; install the same dflow on both"
    ):
        expect(Ok(), Registered, "ps:0")
