"""Train a classifier whose softmax and cross-entropy are one Pallas kernel, forwards and backwards.

    python examples/pallas_kernel.py            # on a CPU in Pallas' interpreter: to try it out, not for use
    python examples/pallas_kernel.py --plain    # only the plain function, for comparison

The plain function defines the loss and runs on every platform without an implementation. On TPUs and NVIDIA GPUs the
Pallas kernels replace it: each program reads a block of rows once and writes the losses, or their gradients, so that
the table of probabilities is never in memory.
"""

from __future__ import annotations

import argparse

import jax
import jax.numpy as jnp
import optax
from jax.experimental import pallas as pl

import dflow

ROWS = 8  #: how many rows a program takes


@dflow.kernel
def cross_entropy(logits, labels):
    """The loss of each row: f32[rows, classes] and i32[rows] to f32[rows]."""
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels)


def loss_body(logits_ref, labels_ref, loss_ref):
    logits = logits_ref[...]
    shifted = logits - logits.max(-1, keepdims=True)
    hit = jax.lax.broadcasted_iota(jnp.int32, logits.shape, 1) == labels_ref[...]
    loss_ref[...] = jnp.log(jnp.exp(shifted).sum(-1, keepdims=True)) - jnp.where(hit, shifted, 0.0).sum(
        -1, keepdims=True
    )


def gradient_body(logits_ref, labels_ref, cotangent_ref, gradient_ref):
    logits = logits_ref[...]
    raised = jnp.exp(logits - logits.max(-1, keepdims=True))
    hit = jax.lax.broadcasted_iota(jnp.int32, logits.shape, 1) == labels_ref[...]
    gradient_ref[...] = (raised / raised.sum(-1, keepdims=True) - hit) * cotangent_ref[...]


def by_rows(body, columns, *operands: jax.Array, interpret):
    """Run `body` on blocks of rows of the operands; the result has the rows of the first, and `columns` columns."""
    rows = operands[0].shape[0]
    blocks = [pl.BlockSpec((ROWS, operand.shape[1]), lambda i: (i, 0)) for operand in operands]
    return pl.pallas_call(
        body,
        jax.ShapeDtypeStruct((rows, columns), operands[0].dtype),
        grid=(rows // ROWS,),
        in_specs=blocks,
        out_specs=pl.BlockSpec((ROWS, columns), lambda i: (i, 0)),
        interpret=interpret,
    )(*operands)


def pallas_cross_entropy(interpret):
    """Return the kernel's implementation in Pallas, with its own gradient."""

    @jax.custom_vjp
    def fused_cross_entropy(logits, labels):
        return by_rows(loss_body, 1, logits, labels[:, None], interpret=interpret)[:, 0]

    def forward(logits, labels):
        return fused_cross_entropy(logits, labels), (logits, labels)

    def backward(kept, cotangent):
        logits, labels = kept
        operands = logits, labels[:, None], cotangent[:, None]
        return by_rows(gradient_body, logits.shape[1], *operands, interpret=interpret), None

    fused_cross_entropy.defvjp(forward, backward)
    return fused_cross_entropy


def make(plain=False):
    """Return the data, the variable, and its optimizer; with `plain` this platform runs the plain function."""
    dflow.kernel(cross_entropy, platform=["cuda", "tpu"])(pallas_cross_entropy(interpret=False))
    if not plain:
        dflow.kernel(cross_entropy, platform="cpu")(pallas_cross_entropy(interpret=True))
    keys = jax.random.split(jax.random.key(0), 3)
    points = jax.random.normal(keys[0], (64, 16))
    labels = jnp.argmax(points @ jax.random.normal(keys[1], (16, 128)), axis=1)
    w = dflow.Variable(lambda: 0.1 * jax.random.normal(keys[2], (16, 128)), name="w")
    return points, labels, w, dflow.Optimizer(optax.adam(0.05), [w], name="adam")


def make_step(points, labels, w, optimizer):
    """Return a compiled step of training."""

    @dflow.jit
    def train_step():
        loss, gradients = dflow.value_and_grad(lambda: cross_entropy(points @ w, labels).mean(), [w])()
        optimizer.apply(gradients)
        return loss

    return train_step


def exported(points, labels, w, optimizer) -> dflow.Exported:
    """Export a step of training with the kernel of each platform; for GPUs Pallas asks for the kind of GPU."""
    return dflow.export(make_step(points, labels, w, optimizer), platforms=("cpu", "tpu"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--plain", action="store_true", help="run the plain function on this platform")
    parser.add_argument("--steps", type=int, default=30)
    arguments = parser.parse_args()

    points, labels, w, optimizer = make(arguments.plain)
    train_step = make_step(points, labels, w, optimizer)
    print(dflow.check_kernel(cross_entropy, points @ w, labels))
    losses = [float(train_step()) for _ in range(arguments.steps)]
    print(f"loss {losses[0]:.4f}, after {arguments.steps} steps {losses[-1]:.4f}")


if __name__ == "__main__":
    main()
