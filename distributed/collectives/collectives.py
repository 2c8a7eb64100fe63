"""The tasks of one job as a group of processes that compute together, by JAX's multi-process runtime."""

from __future__ import annotations

from collections.abc import Callable

from dflow.distributed.client.coordinator_client import ANSWER_S
from dflow.distributed.cluster.cluster import Cluster
from dflow.distributed.collectives.agreed_programs import AgreedPrograms
from dflow.distributed.collectives.group_messages import JoinGroup
from dflow.distributed.collectives.jax_runtime import refuse_late_start, start_runtime
from dflow.distributed.collectives.process_group import ProcessGroup
from dflow.distributed.collectives.process_groups import RETURN_S
from dflow.distributed.transport.addresses import TcpAddress, parse_endpoints
from dflow.distributed.transport.loopback import LOOPBACK
from dflow.lowering.steps.program_watch import ProgramWatch, set_program_watch


class Collectives:
    """The group of processes that this process computes with, and the comparison of their programs.

    `group` and `programs` are None before `start` and after `close`.
    """

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self.group: ProcessGroup | None = None
        self.programs: AgreedPrograms | None = None
        #: Ends JAX's runtime; None if it has not started.
        self._end_runtime: Callable[[], None] | None = None

    def start(self) -> None:
        """Make the tasks of this job one group, and start JAX's multi-process runtime in all of them.

        From then on, the processes compare the programs that they run together, by the program watch.

        raises  DeadlineExceeded naming the tasks that did not do the same; StrategyError if JAX has used a device, or
                if its service cannot be reached. A task that leaves the cluster then may join and start again
        """
        refuse_late_start()
        cluster, settings = self._cluster, self._cluster.settings
        timeout_s = settings.join_timeout_s + RETURN_S
        formed = cluster.coordinator.ask(JoinGroup(cluster.task, timeout_s), timeout_s + ANSWER_S)
        group = ProcessGroup(cluster.coordinator, formed, settings.step_timeout_s)
        main = parse_endpoints(cluster.server.address).main
        host = main.host if isinstance(main, TcpAddress) else LOOPBACK
        try:
            self._end_runtime = start_runtime(group, host, settings.join_timeout_s)
        except BaseException:
            group.abandon()
            raise
        self.group, self.programs = group, AgreedPrograms(group)
        set_program_watch(ProgramWatch(self.programs.called, self.programs.written))

    def close(self) -> None:
        """Wait until all processes of the group close it, and end the runtime; nothing if `start` has not completed."""
        group, end_runtime = self.group, self._end_runtime
        self.group, self.programs, self._end_runtime = None, None, None
        if group is not None and end_runtime is not None:
            set_program_watch(None)
            group.close()
            end_runtime()
