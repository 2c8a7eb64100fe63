"""What the package's structure promises: each name once, folders and files that one can take in."""

from __future__ import annotations

import pytest

from tests.structure import Sources, files_per_folder, shared_class_names, sources_of_tree

#: All use of JAX's internals is in one file. The others are parts of several subjects, to be divided by these; no other
#: file may grow beyond 500 lines.
LONG = {
    "tracing/jax_frontend.py",
    "dflow/training/optimizer.py",
    "dflow/training/saving.py",
    "distributed/coordinator/coordinator_state.py",
    "distributed/coordinator/step_ledger.py",
    "distributed/task/task_server.py",
}
#: Most files of a folder: that of the coordinator has the parts of several subjects.
MOST_FILES = 22


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
