"""Pairs that dflow refuses: the error, and its remedy as a program that is right."""

from __future__ import annotations

import copy
import functools
import re
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import dflow
from tests.composition.kind import NUMBERS, Batch, Held, Outcome, Pair, compare, stacked, whole
from tests.composition.kinds import KINDS, Padded, Queue, Shards
from tests.composition.uses_in_process import Step, all_together, in_scan, one_by_one
from tests.composition.uses_in_processes import all_reduced, hybrid
from tests.composition.uses_of_files import copied, exported, saved
from tests.composition.uses_on_a_cluster import on_tasks


@dataclass(frozen=True)
class Refusal:
    """Pairs with one error and one remedy.

    uses, kinds  names, as wholes, or as beginnings that end with `*`
    matches      a regular expression that the error's text matches
    remedy       the remedy in the words of the docs
    instead      runs the remedy for a pair, in the room of its use; the outcome is compared like any
    """

    uses: tuple[str, ...]
    kinds: tuple[str, ...]
    matches: str
    remedy: str
    instead: Callable[..., Outcome]

    def covers(self, pair: Pair) -> bool:
        """Whether a pair is one of these."""
        return is_named(pair.use, self.uses) and is_named(pair.kind.name, self.kinds)


#: The outcome of a pair that is not refused.
RIGHT = "right"


def judged(run: Callable[..., Outcome], pair: Pair, *room: Any) -> str:
    """Run a pair. Return RIGHT, or the remedy of its refusal, which was followed and is right.

    Raises what the pair raised if that is no refusal of the table, and AssertionError if a value is wrong.
    """
    try:
        compare(run(pair, *room))
        return RIGHT
    except (dflow.DflowError, AttributeError) as error:
        for refusal in REFUSALS:
            if refusal.covers(pair) and re.search(refusal.matches, str(error)):
                break
        else:
            raise
    compare(refusal.instead(Pair(pair.kind, f"{pair.use} instead"), *room))
    return refusal.remedy


def is_named(name: str, names: tuple[str, ...]) -> bool:
    """Whether a name is among names, or begins with one that ends with `*`."""
    return any(name == one or (one.endswith("*") and name.startswith(one[:-1])) for one in names)


def in_place(pair: Pair, *room: Any) -> Any:
    """Make the state in the room of the pair's use: on the tasks of a cluster, or in this process."""
    if room and hasattr(room[0], "parameter_servers"):
        with room[0].parameter_servers():
            return pair.make()
    return pair.make()


def in_its_place(use: Callable[[Pair], Outcome]) -> Callable[..., Outcome]:
    """Return a use of one process with its state in the room of the pair's use."""
    return lambda pair, *room: on_tasks(use)(pair, *room) if room else use(pair)


def split_before(pair: Pair) -> Outcome:
    """Split a generator once before a vmap, and map over the keys."""
    generator = pair.make().items["generator"]
    drawn = dflow.jit(lambda: jax.vmap(jax.random.uniform)(generator.split(3)))()
    keys = jax.random.split(jax.random.key(7), 4)
    return [("results", drawn, np.array([jax.random.uniform(key) for key in keys[1:]]))]


def many_outside(pair: Pair) -> Outcome:
    """Take several elements and give several, outside of a vmap."""
    held, reference, kind = pair.make(), pair.kind.reference(), pair.kind
    queue = held.items["queue"]
    assert isinstance(kind, Queue)

    def step(given: Any) -> None:
        if isinstance(kind, Padded):
            queue.enqueue_many(given["x"])
            return
        taken = queue.dequeue_many(len(NUMBERS))
        queue.enqueue_many(jax.vmap(lambda element, x: kind.element(kind.number(element) + x.sum()))(taken, given["x"]))

    dflow.jit(step)(stacked(pair.batches()))
    for given in pair.batches():
        reference.step(given)
    return [("content", held.state(), reference.state())]


def one_gradient(pair: Pair) -> Outcome:
    """Apply the sum over the batch to an accumulator, outside of the vmap."""
    held, reference = pair.make(), pair.kind.reference()
    sums = held.items["sums"]
    step = dflow.jit(lambda given: sums.apply((jax.vmap(jnp.sum)(given["x"]).sum(), jnp.float32(len(NUMBERS)))))
    step(stacked(pair.batches()))
    for given in pair.batches():
        reference.step(given)
    return [("content", held.state(), reference.state())]


def taken_before(pair: Pair, *room: Any) -> Outcome:
    """Evaluate a function of a value taken before: an element, a key, or the sum of an accumulator."""
    held, given, kind = in_place(pair, *room), pair.batches((0,))[0], pair.kind
    if isinstance(kind, Queue):
        expected = float(kind.number(held.items["queue"].dequeue()))
        taken = expected
    elif "generator" in held.items:
        taken = float(jax.random.uniform(held.items["generator"].split()))
        expected = kind.reference().step(given)
    else:
        held.step(given)
        taken, expected = float(held.items["sums"].take(1)[0]), float(given["x"].sum())
    found = dflow.evaluate(dflow.jit(lambda batch: batch["taken"].mean()), [{"taken": np.full(4, taken, np.float32)}])
    return [("mean", next(iter(found.values())), expected)]


def elements_in_a_variable(pair: Pair, *room: Any) -> Outcome:
    """Take what a queue or an accumulator holds into a variable, and save and restore that."""
    held, reference = in_place(pair, *room), pair.kind.reference()
    first = pair.batches()[0]
    dflow.jit(held.step)(first)
    reference.step(first)
    elements = dflow.Variable(jnp.asarray(held.state(), jnp.float32), name=f"{pair.prefix()}/elements")
    with tempfile.TemporaryDirectory() as folder:
        dflow.save(f"{folder}/one", elements)
        elements.assign(jnp.zeros_like(elements))
        dflow.restore(f"{folder}/one", elements)
    return [("elements", np.asarray(elements.read()), reference.state())]


def elements_as_arguments(pair: Pair, *room: Any) -> Outcome:
    """Export what is between the taking and the giving."""
    given = pair.batches((1,))[0]
    with tempfile.TemporaryDirectory() as folder:
        exported = dflow.export({"between": (lambda taken, x: taken + x.sum(), jnp.float32(0), given["x"])})
        loaded = dflow.load(exported.save(f"{folder}/model"))
        return [("result", loaded.between(jnp.float32(3), given["x"]), 3.0 + given["x"].sum())]


def of_shards(pair: Pair, *room: Any) -> Outcome:
    """Keep a copy of a sharded variable that tracks its changes."""
    other = Pair(Shards("rows"), f"{pair.use} of {pair.kind}")
    if room:
        with room[0].parameter_servers():
            return copied(other)
    return copied(other)


def before_the_rule(pair: Pair) -> Outcome:
    """Do the step before a function with a derivative rule, and pass its result as an argument."""

    def around(held: Held) -> Step:
        def ruled(given: Batch) -> Any:
            @jax.custom_vjp
            def scaled(x: Any, seen: Any) -> Any:
                return seen + 0 * x.sum()

            scaled.defvjp(lambda x, seen: (scaled(x, seen), x), lambda x, ct: (ct * jnp.ones_like(x), ct))
            return dflow.value_and_grad(scaled, argnums=0)(given["x"], held.step(given))[0]

        return dflow.jit(ruled)

    return one_by_one(pair, around)


def untracked(run: Callable[..., Outcome]) -> Callable[..., Outcome]:
    """Return a use of a table that does not mark its changed rows."""

    def instead(pair: Pair, *room: Any) -> Outcome:
        kind = copy.copy(pair.kind)
        kind.tracks = False  # type: ignore[attr-defined]
        return run(Pair(kind, pair.use), *room)

    return instead


def parts_from_a_queue(pair: Pair, cluster: Any, **options: Any) -> Outcome:
    """Take from each worker's queue in its loop: the elements are its part of the batches."""
    strategy, kind = dflow.distributed.AllReduce(cluster, **options), pair.kind
    queue = pair.make().items["queue"]
    assert isinstance(kind, Queue)
    with strategy.variables():
        total = dflow.Variable(lambda: np.zeros(2, np.float32), name=f"{pair.prefix()}/total")
    step = dflow.jit(lambda part: total.assign_add(jnp.full(2, part.sum())))
    parts = (np.full(2, kind.number(queue.dequeue()), np.float32) for _ in range(8))
    done = list(strategy.run(step, parts, steps=8, name=f"{pair.use} of {kind}"))
    return [("steps", len(done), 8), ("total", whole(total), np.full(2, 4.0 * sum(range(8))))]


def averaged_instead(run: Callable[..., Outcome]) -> Callable[..., Outcome]:
    """Return a use of a weight whose gradients the strategy averages."""
    return lambda pair, *room: run(Pair(KINDS["slots of momentum"], pair.use), *room)


_QUEUES = ("FIFOQueue", "RandomShuffleQueue", "PriorityQueue", "PaddingFIFOQueue")
_WAITING = (*_QUEUES, "accumulator")
_SAVES = ("save, restore*", "CheckpointManager", "restore onto tasks")
_EXPORTS = ("export*", "serve")

REFUSALS = [
    Refusal(
        ("custom_vjp", "custom_jvp"),
        _WAITING,
        r"in a differentiated function with a custom derivative rule(.|\n)*pass the value as an argument",
        "use it before the function with the rule, and pass the value as an argument",
        before_the_rule,
    ),
    Refusal(
        ("vmap of a step", "vmap of a read"),
        ("generator",),
        r"split under vmap(.|\n)*split before",
        "split before the `vmap`, and map over the keys too",
        split_before,
    ),
    Refusal(
        ("vmap of a step", "vmap of a read"),
        _QUEUES,
        r"used under vmap(.|\n)*enqueue_many or dequeue_many outside",
        "use `enqueue_many` and `dequeue_many` outside of the `vmap`",
        many_outside,
    ),
    Refusal(
        ("vmap of a step", "vmap of a read"),
        ("accumulator",),
        r"used under vmap(.|\n)*apply one gradient",
        "apply one gradient, such as the mean over the batch, outside of the `vmap`",
        one_gradient,
    ),
    Refusal(
        ("vmap of a step", "vmap of a read"),
        ("*",),
        r"written under vmap with a value that differs(.|\n)*write outside the vmap",
        'write outside of the `vmap`, for instance in a `scan`, or sum over the batch with `reduce="sum"`',
        lambda pair: all_together(pair, in_scan),
    ),
    Refusal(
        ("evaluate",),
        ("generator", *_WAITING),
        r"only reads variables(.|\n)*give a function without updates",
        "give a function without updates: take elements, and split keys, before",
        taken_before,
    ),
    Refusal(
        _SAVES,
        _WAITING,
        r"what is in queues and accumulators is not saved(.|\n)*into variables",
        "take the elements out into variables, and save these",
        elements_in_a_variable,
    ),
    Refusal(
        ("save, restore as safetensors",),
        ("variable key",),
        r"expected one of the dtypes(.|\n)*save it to a folder",
        "save it to a folder, which has all dtypes",
        saved(),
    ),
    Refusal(
        _EXPORTS,
        _WAITING,
        r"cannot be exported: it uses (.|\n)*as arguments",
        "export a function that takes as arguments what it would take from the queue, and returns what it would put in",
        elements_as_arguments,
    ),
    Refusal(
        ("changed_rows*",),
        ("*",),
        r"'changed_rows'|track_changes=True",
        "make a `ShardedVariable` or an `Embedding` by rows or modulo, with `track_changes=True`",
        of_shards,
    ),
    Refusal(
        ("microbatches",),
        ("vocabulary*",),
        r"expected the result of one find as it is(.|\n)*find, look up and apply in each iteration",
        "find, look up and apply in each iteration, or find the ids of all microbatches before the loop",
        lambda pair: all_together(pair, in_scan),
    ),
    Refusal(
        ("export of any size", "export from tasks, of any size"),
        ("*",),
        r"(expected ids of a fixed shape|needs the number)(.|\n)*export (it|the step) for one size",
        "export it for one size of its batches",
        in_its_place(exported("")),
    ),
    Refusal(
        ("export in *",),
        ("*",),
        r"expected a floating-point variable of two dimensions or more(.|\n)*leave weights out",
        "leave `weights` out",
        exported(""),
    ),
    Refusal(
        ("AllReduce*",),
        ("vocabulary*",),
        r"has a vocabulary: expected it on parameter tasks(.|\n)*train it by Async, Sync or Hybrid",
        "make the table within `cluster.parameter_servers()`, and train it by `Async`, `Sync` or `Hybrid`",
        hybrid,
    ),
    *(
        refusal
        for use, run in (
            ("AllReduce", all_reduced),
            ("AllReduce(fully_sharded=True)", functools.partial(all_reduced, fully_sharded=True)),
        )
        for refusal in (
            Refusal(
                (use,),
                ("embedding*", "sharded*"),
                r"track_changes: expected a table on parameter tasks(.|\n)*leave track_changes out",
                "leave `track_changes` out, or make the table within `cluster.parameter_servers()` for `Hybrid`",
                untracked(run),
            ),
            Refusal(
                (use,),
                _QUEUES,
                r"of a queue that each worker has for itself(.|\n)*take from the queue in the loop",
                "take from the queue in the loop, as the worker's part of the batch",
                parts_from_a_queue,
            ),
            Refusal(
                (use,),
                ("accumulator",),
                r"expected no accumulator(.|\n)*leave it out: AllReduce averages the gradients",
                "leave it out: the strategy averages the gradients of all workers",
                averaged_instead(run),
            ),
        )
    ),
]
