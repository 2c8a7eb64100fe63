"""Every exception class of dflow.

Each inherits `DflowError` and, where one fits, the builtin a caller would catch without knowing dflow.
A message states the fact with both values, then the user's line, then the remedy.
"""

from __future__ import annotations

from dflow.tracing.source import Loc, caller


class DflowError(Exception):
    """Base of every error that dflow raises on purpose.

    `fact`    what was expected and what was found
    `remedy`  what the user can do, as an imperative. With a remedy the message also has the user's line
    `at`      the line to show; by default the innermost line of the running stack that is the user's, unless the fact
              ends with a line, as one that another task reported does
    """

    def __init__(self, fact: str = "", remedy: str = "", *, at: Loc | None = None) -> None:
        line = at or (caller() if remedy and "\n  at " not in fact else None)
        super().__init__(fact + (f"\n  at {line}" if line else "") + (f"\n  {remedy}" if remedy else ""))


class InternalError(DflowError, RuntimeError):
    """A fault of dflow's own; please report it with the message."""


class GraphTypeError(DflowError, TypeError):
    """An op was given operands whose types its typing rule refuses."""


class VerifyError(DflowError, ValueError):
    """A graph breaks a rule every graph must keep; raised by the verifier, naming the node."""


class GraphNameError(DflowError, LookupError):
    """A graph has no value of the name that was asked for; the message has the names that are near."""


class ParseError(DflowError, ValueError):
    """A graph's text form could not be read; the message has the line and column."""


class VariableError(DflowError, ValueError):
    """A variable was made, found or used in a way that contradicts how it was made before."""


class ContainerError(DflowError, ValueError):
    """A container does not exist, or cannot be reset; the message lists the existing ones."""


class AccumulatorError(DflowError, ValueError):
    """An accumulator cannot do the op, or got a value of another type than its own."""


class VariableShapeError(VariableError, TypeError):
    """A value of another shape or dtype was written to a variable."""


class KernelError(DflowError, ValueError):
    """A kernel is used in an unsupported way, or an implementation's results differ from the plain function's."""


class PlainJitError(DflowError, RuntimeError):
    """A function with state is compiled by JAX alone, which does not know where the state is."""


class ExportError(DflowError, ValueError):
    """A function cannot be exported, or a directory holds no export that can be loaded; the message says why."""


class SignatureError(ExportError, TypeError):
    """A loaded function was called with arguments of another structure, shape or dtype than it was exported for."""


class LostWriteError(DflowError, RuntimeError):
    """A plain `jax.grad` (or `jvp`, `vjp`) would drop or reorder a variable write.

    Differentiate with `dflow.grad` or `dflow.value_and_grad`, which carry the state through.
    """


class DeviceError(DflowError, ValueError):
    """A device was named that no task of the cluster offers, or whose name cannot be read."""


class WireError(DflowError, ValueError):
    """Bytes from a peer are malformed, oversized, or of another protocol version."""


class TransportClosed(DflowError, ConnectionError):
    """The connection to a peer has ended; the message names the peer and the reason."""


class TaskLost(DflowError, ConnectionError):
    """A task that a step needs has left, or was restarted without its state; the message names it, when, and why."""


class DeadlineExceeded(DflowError, TimeoutError):
    """A wait reached its deadline; the message names the missing thing, its sender, and the time waited."""


class StrategyError(DflowError, ValueError):
    """A strategy cannot run this training step, or cannot use these settings; the message says what it needs."""


class TrainingError(DflowError, ValueError):
    """A trainer or an evaluation cannot use this step, these batches or these settings; the message says which."""


class StepCancelled(DflowError, RuntimeError):
    """A step was cancelled before it ended; the message has the cause."""


class StepEnded(DflowError, RuntimeError):
    """A step of a run was begun again after it had ended on all tasks, so that nothing of it is left to do.

    A strategy counts the step as done.
    """


class RemoteError(DflowError, RuntimeError):
    """A task failed to do what it was asked; the message is the task's own."""


class SecurityError(DflowError, PermissionError):
    """dflow cannot protect a requested connection, or a peer failed authentication; the message says which."""


class CheckpointError(DflowError, ValueError):
    """Saved arrays are damaged, cannot be written, or do not fit what they are restored into."""


class DamagedCheckpoint(CheckpointError):
    """A manifest or an array of a checkpoint is missing, or its bytes differ from the saved ones."""


class CheckpointExists(CheckpointError, FileExistsError):
    """The path where a checkpoint would be written exists already."""


class NoCheckpoint(CheckpointError, FileNotFoundError):
    """There is no checkpoint at a path; the message lists those beside it."""


class ConfigError(DflowError, ValueError):
    """A setting has a value that is not legal; the message lists the legal ones."""


class QueueError(DflowError, ValueError):
    """A queue was created or used in an unsupported way; the message says how, and what is supported."""


class QueueTypeError(QueueError, TypeError):
    """An element put into a queue has another structure, shape or dtype than the queue's elements."""


class FeedError(DflowError, RuntimeError):
    """The producer of a queue has failed; the message says how and where, and the error itself is the cause."""


class InputError(DflowError, ValueError):
    """Data or settings of an input pipeline are not supported; the message says which, and what is supported.

    `outside` is the id that the error is about, if it is about one that a table does not have.
    """

    outside: int | None = None


class NumberRangeError(InputError, OverflowError):
    """An integer of NumPy or Python is beyond the 32 bits that JAX keeps of it; the message has it and its position."""


class QueueClosed(DflowError, RuntimeError):
    """A queue is closed: it takes no more elements, or has fewer left than the op takes."""
