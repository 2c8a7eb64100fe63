"""All public names; `dflow` imports this module when one of them is first used."""

from dflow import data, distributed, lax, nn, numpy, random
from dflow.cluster import connect
from dflow.device_memory import configure
from dflow.distributed.worker.cluster import ClusterSettings
from dflow.eager_mode import eager
from dflow.exporter import Exported, export, spec
from dflow.function import Function, jit
from dflow.generator import Generator
from dflow.graph_view import GraphView, graph
from dflow.kernel_check import KernelCheck, check_kernel
from dflow.loader import Loaded, load
from dflow.optimizer import Optimizer
from dflow.placement_view import PlacedPart, Placement, explain_placement
from dflow.restore_report import RestoreReport
from dflow.saving import restore, save
from dflow.scopes import colocate_with, device
from dflow.trace_log import RetraceWarning
from dflow.tracing.accumulators import ConditionalAccumulator
from dflow.tracing.autodiff import grad, hvp, jvp, value_and_grad, vjp
from dflow.tracing.container import container, containers, reset_container
from dflow.tracing.errors import (
    AccumulatorError,
    CheckpointError,
    CheckpointExists,
    ConfigError,
    ContainerError,
    DeadlineExceeded,
    DeviceError,
    DflowError,
    ExportError,
    FeedError,
    GraphNameError,
    GraphTypeError,
    InputError,
    KernelError,
    LostWriteError,
    NoCheckpoint,
    PlainJitError,
    QueueClosed,
    QueueError,
    QueueTypeError,
    StrategyError,
    TaskLost,
    VariableError,
    VariableShapeError,
)
from dflow.tracing.kernels import Kernel, kernel
from dflow.tracing.leaks import LeakedTracerWarning
from dflow.tracing.loops import while_loop
from dflow.tracing.namesakes import DuplicateNameWarning
from dflow.tracing.parallel_iterations import parallel_iterations
from dflow.tracing.queues import FIFOQueue, PaddedSpec, PaddingFIFOQueue, PriorityQueue, RandomShuffleQueue
from dflow.tracing.resources import Variable, is_variable, name, read
from dflow.tracing.row_gradient import RowGradient, is_row_gradient
from dflow.tracing.rows_to_dense import DenseGradientWarning
from dflow.tracing.unread_variables import UnreadVariableWarning
from dflow.tracing.variable_trees import assign, trainable_variables, variables
from dflow.tracing.wire import wire

__all__ = [
    "AccumulatorError",
    "CheckpointError",
    "CheckpointExists",
    "ClusterSettings",
    "ConditionalAccumulator",
    "ConfigError",
    "ContainerError",
    "DeadlineExceeded",
    "DenseGradientWarning",
    "DeviceError",
    "DflowError",
    "DuplicateNameWarning",
    "ExportError",
    "Exported",
    "FIFOQueue",
    "FeedError",
    "Function",
    "Generator",
    "GraphNameError",
    "GraphTypeError",
    "GraphView",
    "InputError",
    "Kernel",
    "KernelCheck",
    "KernelError",
    "LeakedTracerWarning",
    "Loaded",
    "LostWriteError",
    "NoCheckpoint",
    "Optimizer",
    "PaddedSpec",
    "PaddingFIFOQueue",
    "PlacedPart",
    "Placement",
    "PlainJitError",
    "PriorityQueue",
    "QueueClosed",
    "QueueError",
    "QueueTypeError",
    "RandomShuffleQueue",
    "RestoreReport",
    "RetraceWarning",
    "RowGradient",
    "StrategyError",
    "TaskLost",
    "UnreadVariableWarning",
    "Variable",
    "VariableError",
    "VariableShapeError",
    "assign",
    "check_kernel",
    "colocate_with",
    "configure",
    "connect",
    "container",
    "containers",
    "data",
    "device",
    "distributed",
    "eager",
    "explain_placement",
    "export",
    "grad",
    "graph",
    "hvp",
    "is_row_gradient",
    "is_variable",
    "jit",
    "jvp",
    "kernel",
    "lax",
    "load",
    "name",
    "nn",
    "numpy",
    "parallel_iterations",
    "random",
    "read",
    "reset_container",
    "restore",
    "save",
    "spec",
    "trainable_variables",
    "value_and_grad",
    "variables",
    "vjp",
    "while_loop",
    "wire",
]
