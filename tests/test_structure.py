"""What the package's structure promises: each name once, folders and files that one can take in, few classes."""

from __future__ import annotations

from pathlib import PurePosixPath

import pytest

from tests.structure import (
    TESTS,
    Sources,
    classes,
    classes_per_1000_lines,
    delegations,
    files_per_folder,
    lines_per_layer,
    lone_protocols,
    shared_class_names,
    sources_of_tree,
)

#: All use of JAX's internals is in one file; no other file may grow beyond 500 lines.
LONG = {"tracing/jax_frontend.py"}
#: Most files of a folder: that of the coordinator has the parts of several subjects.
MOST_FILES = 22
#: Figures of `python -m tests.structure` that may fall and not rise: a change that lowers one lowers its limit here.
MOST_CLASSES_PER_1000_LINES = 10.7
MOST_LONE_PROTOCOLS = 0
MOST_DELEGATIONS = 42
MOST_LINES_OF_TESTS_PER_LINE = 0.98


@pytest.fixture(scope="module")
def sources() -> Sources:
    return sources_of_tree()


@pytest.mark.once
def test_no_two_classes_share_a_name(sources: Sources) -> None:
    assert shared_class_names(sources) == {}


@pytest.mark.once
def test_few_files_have_more_than_500_lines(sources: Sources) -> None:
    assert {str(file) for file, text in sources.items() if text.count("\n") > 500} <= LONG


@pytest.mark.once
def test_no_folder_has_more_files_than_one_can_take_in(sources: Sources) -> None:
    assert max(files_per_folder(sources).values()) <= MOST_FILES


@pytest.mark.once
def test_classes_do_not_grow_faster_than_lines(sources: Sources) -> None:
    assert classes_per_1000_lines(sources) <= MOST_CLASSES_PER_1000_LINES


@pytest.mark.once
def test_protocols_with_one_implementation_do_not_increase(sources: Sources) -> None:
    lone = lone_protocols(classes(sources))
    assert len(lone) <= MOST_LONE_PROTOCOLS, lone


@pytest.mark.once
def test_methods_that_only_delegate_do_not_increase(sources: Sources) -> None:
    assert len(delegations(sources)) <= MOST_DELEGATIONS, delegations(sources)


@pytest.mark.once
def test_tests_do_not_grow_faster_than_what_they_test(sources: Sources) -> None:
    tests = lines_per_layer(sources_of_tree(TESTS)).total()
    assert tests <= MOST_LINES_OF_TESTS_PER_LINE * lines_per_layer(sources).total()


@pytest.mark.once
def test_a_protocol_is_implemented_by_its_members_and_their_parameters_or_by_its_name() -> None:
    text = """
class Walks(Protocol):
    pace: int
    def walk(self, steps): ...
class Dog:
    def __init__(self): self.pace = 1
    def walk(self, steps, fast=False): ...
class Fish:
    pace = 0
    def walk(self): ...
class Cat(Walks): ...
class Call(Protocol):
    def __call__(self): ...
"""
    assert lone_protocols(classes({PurePosixPath("a.py"): text})) == []
    assert lone_protocols(classes({PurePosixPath("a.py"): text.replace("Cat(Walks)", "Cat")})) == ["a.py:2 Walks"]


@pytest.mark.once
def test_a_method_delegates_if_it_adds_nothing_to_what_it_calls() -> None:
    text = """
class File:
    def close(self): "Close it."; self._file.close()
    @property
    def size(self): return self._file.size
    def write(self, text): return self.put(text)
    def put(self, text): return self._file.write(text.encode())
    def first(self): return self.put("a")
    def name(self): return self._name
"""
    found = delegations({PurePosixPath("a.py"): text})
    assert [place.split(".")[-1] for place in found] == ["close", "size", "write"]
