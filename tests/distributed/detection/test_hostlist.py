import pytest
from hypothesis import given
from hypothesis import strategies as st

from dflow.distributed.detection.slurm import expanded
from dflow.tracing.errors import ConfigError


@pytest.mark.parametrize(
    ("short", "names"),
    [
        ("node001", ["node001"]),
        ("node001,host2", ["node001", "host2"]),
        ("node[001-003],host2", ["node001", "node002", "node003", "host2"]),
        ("node[001,007-009],host2", ["node001", "node007", "node008", "node009", "host2"]),
        ("n[9-11]", ["n9", "n10", "n11"]),
        ("r[0-1]n[1,3]x", ["r0n1x", "r0n3x", "r1n1x", "r1n3x"]),
        ("a-1.example.org,b", ["a-1.example.org", "b"]),
    ],
)
def test_lists_are_written_out_in_order(short: str, names: list[str]) -> None:
    assert expanded(short) == names


@pytest.mark.parametrize("short", ["", ",", "a,", ",a", "a,,b", "n[", "n]", "n[]", "n[1-]", "n[a-b]", "n[3-1]", "a b"])
def test_a_text_that_is_no_list_of_hosts_is_refused(short: str) -> None:
    with pytest.raises(ConfigError, match="is no list of hosts; one looks like node1,node"):
        expanded(short)


@pytest.mark.parametrize("short", ["n[1-999999999]", "n[0-9999]m[0-9999]"])
def test_a_list_that_would_fill_the_memory_is_refused(short: str) -> None:
    with pytest.raises(ConfigError, match="stands for more than 1048576 hosts"):
        expanded(short)


@given(st.lists(st.tuples(st.sampled_from(["n", "gpu-", "r1n"]), st.integers(0, 99), st.integers(0, 20)), min_size=1))
def test_ranges_keep_width_and_order(parts: list[tuple[str, int, int]]) -> None:
    short = ",".join(f"{prefix}[{first:03d}-{first + more:03d}]" for prefix, first, more in parts)
    names = [f"{prefix}{number:03d}" for prefix, first, more in parts for number in range(first, first + more + 1)]
    assert expanded(short) == names


@given(st.text(alphabet="n0123456789[]-, ", max_size=30))
def test_any_text_gives_names_or_a_clear_refusal(short: str) -> None:
    try:
        names = expanded(short)
    except ConfigError:
        return
    assert names
    assert not any(sign in name for name in names for sign in "[], ")
