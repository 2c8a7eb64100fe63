"""The parts of the coordinator; in this order they handle an event.

`task_role.py` has those of a task.
"""

from __future__ import annotations

from functools import partial

from dflow.distributed.asynchronous.step_claims import StepClaims
from dflow.distributed.collectives.process_groups import ProcessGroups
from dflow.distributed.coordinator.barriers import Barriers
from dflow.distributed.coordinator.coordinator import Coordinator, serve_coordinator
from dflow.distributed.coordinator.coordinator_part import CoordinatorPart
from dflow.distributed.coordinator.coordinator_state import CoordinatorState
from dflow.distributed.coordinator.decisions import Decisions
from dflow.distributed.coordinator.progress_watch import ProgressWatch
from dflow.distributed.coordinator.task_totals import TaskTotals
from dflow.distributed.snapshots.cluster_snapshots import ClusterSnapshots
from dflow.distributed.snapshots.recovery import Recovery
from dflow.distributed.snapshots.step_pauses import StepPauses
from dflow.distributed.training.reported_results import ReportedResults
from dflow.distributed.training.run_progress import RunProgress
from dflow.distributed.training.step_comparisons import StepComparisons

#: Pauses come before the parts that decide during one, and progress before the claims that it counts.
COORDINATOR_PARTS: tuple[type[CoordinatorPart], ...] = (
    ProgressWatch,
    TaskTotals,
    Decisions,
    Barriers,
    StepComparisons,
    StepPauses,
    ClusterSnapshots,
    Recovery,
    ProcessGroups,
    ReportedResults,
    RunProgress,
    StepClaims,
)

make_coordinator = partial(Coordinator, parts=COORDINATOR_PARTS)
make_coordinator_state = partial(CoordinatorState, parts=COORDINATOR_PARTS)
run_coordinator = partial(serve_coordinator, parts=COORDINATOR_PARTS)
