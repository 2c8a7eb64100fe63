"""All public names; `dflow` imports this module when one of them is first used."""

from dflow import data, distributed, lax, loggers, metrics, nn, numpy, random
from dflow.calls.eager_mode import eager
from dflow.calls.function import Function, jit
from dflow.calls.trace_log import RetraceWarning
from dflow.cluster import connect
from dflow.config import configure
from dflow.distributed.cluster.cluster import ClusterSettings
from dflow.distributed.training.compiled_step import compile_steps_by
from dflow.exporting.exporter import Exported, export, spec
from dflow.exporting.loader import Loaded, load
from dflow.graphs.graph_view import GraphView, graph
from dflow.graphs.placement_view import PlacedPart, Placement, explain_placement
from dflow.kernel_check import KernelCheck, check_kernel
from dflow.scopes import colocate_with, device
from dflow.tables.embedding import Embedding
from dflow.tables.sharded_variable import ShardedVariable
from dflow.tables.softmax import sampled_softmax_cross_entropy, softmax_cross_entropy
from dflow.tables.vocabulary import FoundIds, Vocabulary, VocabularyCounts
from dflow.tracing.derivatives.autodiff import UnreadVariableWarning, grad, hvp, jvp, value_and_grad, vjp
from dflow.tracing.derivatives.loops import while_loop
from dflow.tracing.errors import (
    AccumulatorError,
    CheckpointError,
    CheckpointExists,
    ConfigError,
    ContainerError,
    DamagedCheckpoint,
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
    NumberRangeError,
    PlainJitError,
    QueueClosed,
    QueueError,
    QueueTypeError,
    StrategyError,
    TaskLost,
    TrainingError,
    VariableError,
    VariableShapeError,
)
from dflow.tracing.jaxprs.leaks import LeakedTracerWarning
from dflow.tracing.kernels import Kernel, kernel
from dflow.tracing.number_range import NumberRangeWarning
from dflow.tracing.parallel_iterations import parallel_iterations
from dflow.tracing.primitives.namesakes import DuplicateNameWarning
from dflow.tracing.rows.row_gradient import RowGradient, is_row_gradient
from dflow.tracing.rows.rows_to_dense import DenseGradientWarning
from dflow.tracing.state.accumulators import ConditionalAccumulator
from dflow.tracing.state.container import container, containers, reset_container
from dflow.tracing.state.queues import FIFOQueue, PaddedSpec, PaddingFIFOQueue, PriorityQueue, RandomShuffleQueue
from dflow.tracing.state.resources import Variable, is_variable, name, read
from dflow.tracing.state.variable_trees import assign, trainable_variables, variables
from dflow.tracing.state.wire import wire
from dflow.tracing.wide_ids import WideIds, wide_ids
from dflow.trainer.callbacks import Callback, EarlyStopping
from dflow.trainer.evaluation import evaluate
from dflow.trainer.trainer import Trainer, TrainingResult
from dflow.training.checkpoint_manager import CheckpointManager
from dflow.training.generator import Generator
from dflow.training.optimizer import Optimizer
from dflow.training.restoring import RestoreReport, restore
from dflow.training.saving import save
from dflow.training.sharded_updates import ShardedUpdateWarning

compile_steps_by(jit)

__all__ = [
    "AccumulatorError",
    "Callback",
    "CheckpointError",
    "CheckpointExists",
    "CheckpointManager",
    "ClusterSettings",
    "ConditionalAccumulator",
    "ConfigError",
    "ContainerError",
    "DamagedCheckpoint",
    "DeadlineExceeded",
    "DenseGradientWarning",
    "DeviceError",
    "DflowError",
    "DuplicateNameWarning",
    "EarlyStopping",
    "Embedding",
    "ExportError",
    "Exported",
    "FIFOQueue",
    "FeedError",
    "FoundIds",
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
    "NumberRangeError",
    "NumberRangeWarning",
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
    "ShardedUpdateWarning",
    "ShardedVariable",
    "StrategyError",
    "TaskLost",
    "Trainer",
    "TrainingError",
    "TrainingResult",
    "UnreadVariableWarning",
    "Variable",
    "VariableError",
    "VariableShapeError",
    "Vocabulary",
    "VocabularyCounts",
    "WideIds",
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
    "evaluate",
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
    "loggers",
    "metrics",
    "name",
    "nn",
    "numpy",
    "parallel_iterations",
    "random",
    "read",
    "reset_container",
    "restore",
    "sampled_softmax_cross_entropy",
    "save",
    "softmax_cross_entropy",
    "spec",
    "trainable_variables",
    "value_and_grad",
    "variables",
    "vjp",
    "while_loop",
    "wide_ids",
    "wire",
]
