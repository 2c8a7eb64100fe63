"""A transformation of each family of optax and optax.contrib, with the arguments of its update."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import optax
from optax import contrib


@dataclass(frozen=True)
class Case:
    """A transformation. `extra` has the names of its update's arguments other than gradients, state and parameters.

    With `by_example` the update takes a gradient for each example.
    """

    make: Callable[[], Any]
    extra: tuple[str, ...] = ()
    by_example: bool = False


SEARCH = ("value", "grad", "value_fn")


def _is_kernel(tree: Any) -> Any:
    return jax.tree.map(lambda leaf: leaf.ndim > 1, tree)


def _labels(tree: Any) -> Any:
    return jax.tree.map(lambda leaf: "kernel" if leaf.ndim > 1 else "bias", tree)


_BY_LABEL = {"kernel": optax.adam(1e-2), "bias": optax.sgd(0.1)}
_RATE = 1e-2

#: One transformation of each family, with a learning rate alone: adam for families with moments (adamw, nadam and so
#: on), sgd for those with a factor or a sign, rmsprop and adagrad for those with running and with summed squares.
_RATED = ("adam", "sgd", "rmsprop", "adagrad", "lion", "lamb", "sm3", "novograd", "optimistic_gradient_descent")
_RATED_CONTRIB = ("muon", "prodigy", "dog", "schedule_free_adamw", "madgrad")
#: Without arguments.
_PLAIN = ("scale_by_lbfgs", "centralize", "zero_nans")


def _scaled(transformation: Any) -> Any:
    """The transformation with a step that is small enough to keep the loss finite."""
    return optax.chain(transformation, optax.scale(-_RATE))


CASES: dict[str, Case] = {
    **{name: Case(lambda name=name: getattr(optax, name)(_RATE)) for name in _RATED},
    **{f"contrib.{name}": Case(lambda name=name: getattr(contrib, name)(_RATE)) for name in _RATED_CONTRIB},
    **{name: Case(lambda name=name: _scaled(getattr(optax, name)())) for name in _PLAIN},
    "contrib.cocob": Case(lambda: _scaled(contrib.cocob())),
    "adam with moments of bfloat16": Case(lambda: optax.adam(_RATE, mu_dtype="bfloat16")),
    "adafactor": Case(lambda: optax.adafactor(_RATE, min_dim_size_to_factor=2)),
    "add_noise": Case(lambda: _scaled(optax.add_noise(0.01, 0.55, key=1))),
    "apply_every": Case(lambda: _scaled(optax.apply_every(3))),
    "apply_if_finite": Case(lambda: optax.apply_if_finite(optax.adam(_RATE), 3)),
    "chain": Case(lambda: optax.chain(optax.clip(0.5), optax.adam(optax.linear_schedule(0.1, 0.01, 10)))),
    "clip_by_global_norm": Case(lambda: _scaled(optax.clip_by_global_norm(0.1))),
    "conditionally_transform": Case(
        lambda: _scaled(optax.conditionally_transform(optax.scale_by_adam(), lambda step, value: value > 1.0, True)),
        ("value",),
    ),
    "flatten": Case(lambda: optax.flatten(optax.adam(_RATE))),
    "freeze": Case(lambda: optax.chain(optax.adam(_RATE), optax.freeze(False))),
    "inject_hyperparams": Case(lambda: optax.inject_hyperparams(optax.adam)(optax.exponential_decay(_RATE, 5, 0.5))),
    "lbfgs": Case(optax.lbfgs, SEARCH),
    "masked": Case(lambda: optax.masked(optax.adam(_RATE), _is_kernel)),
    "multi_transform": Case(lambda: optax.multi_transform(_BY_LABEL, _labels)),
    "named_chain": Case(lambda: optax.named_chain(("clip", optax.clip(0.5)), ("adam", optax.adam(_RATE)))),
    "noisy_sgd": Case(lambda: optax.noisy_sgd(_RATE, key=1)),
    "polyak_sgd": Case(optax.polyak_sgd, ("value",)),
    "scale_by_backtracking_linesearch": Case(
        lambda: optax.chain(optax.sgd(1.0), optax.scale_by_backtracking_linesearch(15, store_grad=True)), SEARCH
    ),
    "scale_by_zoom_linesearch": Case(lambda: optax.chain(optax.sgd(1.0), optax.scale_by_zoom_linesearch(15)), SEARCH),
    "selective_transform": Case(lambda: optax.selective_transform(optax.adam(_RATE), freeze_mask=_is_kernel)),
    "snapshot": Case(lambda: optax.chain(optax.snapshot("norm", optax.tree.norm), optax.sgd(_RATE))),
    "stateless_with_tree_map": Case(lambda: optax.stateless_with_tree_map(lambda g, p: -_RATE * g - 1e-3 * p)),
    "trace": Case(lambda: _scaled(optax.trace(0.9, nesterov=True))),
    "MultiSteps": Case(lambda: optax.MultiSteps(optax.adam(_RATE), every_k_schedule=2)),
    "contrib.differentially_private_aggregate": Case(
        lambda: _scaled(contrib.differentially_private_aggregate(0.5, 0.1, key=1)), by_example=True
    ),
    "contrib.dpsgd": Case(lambda: contrib.dpsgd(0.1, 0.5, 0.1, seed=1), by_example=True),
    "contrib.galore": Case(lambda: contrib.galore(_RATE, rank=2)),
    "contrib.dadapt_adamw": Case(lambda: contrib.dadapt_adamw(estim_lr0=_RATE)),
    "contrib.mechanize": Case(lambda: contrib.mechanize(optax.adam(_RATE), s_init=0.1)),
    "contrib.momo": Case(contrib.momo, ("value",)),
    "contrib.reduce_on_plateau": Case(
        lambda: optax.chain(optax.sgd(0.5), contrib.reduce_on_plateau(0.5, patience=1, rtol=0.05)), ("value",)
    ),
    "contrib.sam": Case(lambda: contrib.sam(optax.sgd(0.1), optax.chain(contrib.normalize(), optax.sgd(0.05)))),
    "contrib.sam, opaque": Case(
        lambda: contrib.sam(
            optax.sgd(0.1), optax.chain(contrib.normalize(), optax.sgd(0.05)), sync_period=3, opaque_mode=True
        ),
        ("grad_fn",),
    ),
    "contrib.schedule_free": Case(lambda: contrib.schedule_free(optax.adam(_RATE, b1=0.0), _RATE)),
    "contrib.sophia": Case(lambda: contrib.sophia(_RATE), ("obj_fn",)),
    "contrib.hutchinson_estimator_diag_hessian": Case(
        lambda: _scaled(contrib.hutchinson_estimator_diag_hessian()), ("obj_fn",)
    ),
    "contrib.split_real_and_imaginary": Case(lambda: contrib.split_real_and_imaginary(optax.adam(_RATE))),
}
