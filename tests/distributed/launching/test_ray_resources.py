import pytest

from dflow.distributed.launching.ray_resources import amounts_text, ray_resources


@pytest.mark.parametrize(
    ("text", "resources"),
    [
        ("CPU=2", {"CPU": 2.0}),
        ("GPU=0.5", {"CPU": 1.0, "GPU": 0.5}),
        ("CPU=0, GPU=1,tpu=4", {"CPU": 0.0, "GPU": 1.0, "tpu": 4.0}),
    ],
)
def test_resources_are_read(text: str, resources: dict[str, float]) -> None:
    assert ray_resources(text) == resources


@pytest.mark.parametrize("text", ["", "CPU", "CPU=", "=1", "CPU=x", "CPU=-1", "CPU=1,,", "CPU=nan"])
def test_a_text_without_a_resource_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"states no resources; write them as CPU=1,GPU=0\.5"):
        ray_resources(text)


def test_amounts_are_told_without_memory_and_single_nodes() -> None:
    has = {"node:10.0.0.1": 1.0, "CPU": 8.0, "memory": 1e9, "object_store_memory": 1e9, "GPU": 0.5}
    assert amounts_text(has) == "CPU 8, GPU 0.5"
    assert amounts_text({}) == "nothing"
