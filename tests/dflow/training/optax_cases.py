"""Every transformation of optax and optax.contrib, with the arguments of its update."""

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


def _second_step(step: Any, **_: Any) -> Any:
    return step % 2 == 0


def _is_kernel(tree: Any) -> Any:
    return jax.tree.map(lambda leaf: leaf.ndim > 1, tree)


def _labels(tree: Any) -> Any:
    return jax.tree.map(lambda leaf: "kernel" if leaf.ndim > 1 else "bias", tree)


_BY_LABEL = {"kernel": optax.adam(1e-2), "bias": optax.sgd(0.1)}
_RATE = 1e-2

#: Transformations that need only a learning rate.
_RATED = (
    "adabelief adadelta adagrad adam adamax adamaxw adamw adan amsgrad fromage lamb lars lion nadam nadamw",
    "novograd optimistic_adam_v2 optimistic_gradient_descent radam rmsprop rprop scale_by_learning_rate",
    "scale_by_rprop sgd sign_sgd signum sm3 yogi",
)
_RATED_CONTRIB = (
    "acprop ademamix adopt dog dowg madgrad muon prodigy scale_by_madgrad schedule_free_adamw schedule_free_sgd",
    "simplified_ademamix",
)

#: Transformations without arguments.
_PLAIN = (
    "centralize identity keep_params_nonnegative normalize_by_update_norm scale_by_adadelta scale_by_adam",
    "scale_by_adamax scale_by_adan scale_by_amsgrad scale_by_belief scale_by_distance_over_gradients",
    "scale_by_lbfgs scale_by_lion scale_by_novograd scale_by_optimistic_gradient scale_by_param_block_norm",
    "scale_by_param_block_rms scale_by_radam scale_by_rms scale_by_rss scale_by_sign scale_by_sm3 scale_by_stddev",
    "scale_by_trust_ratio scale_by_yogi set_to_zero zero_nans add_decayed_weights",
)
_PLAIN_CONTRIB = (
    "cocob normalize scale_by_acprop scale_by_ademamix scale_by_adopt scale_by_cocob scale_by_simplified_ademamix",
)


def _split(lines: tuple[str, ...]) -> list[str]:
    return " ".join(lines).split()


#: One transformation of each family: adam for families with moments (adamw, nadam, scale_by_adam and so on), sgd for
#: those with a factor or a sign, rmsprop and adagrad for those with running and with summed squares.
_OF_EACH_FAMILY = (
    "adam sgd rmsprop adagrad lion lamb sm3 novograd scale_by_lbfgs optimistic_gradient_descent centralize zero_nans",
    "contrib.muon contrib.prodigy contrib.dog contrib.schedule_free_adamw contrib.madgrad contrib.cocob",
)


def _scaled(transformation: Any) -> Any:
    """The transformation with a step that is small enough to keep the loss finite."""
    return optax.chain(transformation, optax.scale(-_RATE))


CASES: dict[str, Case] = {
    **{name: Case(lambda name=name: getattr(optax, name)(_RATE)) for name in _split(_RATED)},
    **{f"contrib.{name}": Case(lambda name=name: getattr(contrib, name)(_RATE)) for name in _split(_RATED_CONTRIB)},
    **{name: Case(lambda name=name: _scaled(getattr(optax, name)())) for name in _split(_PLAIN)},
    **{f"contrib.{name}": Case(lambda name=name: _scaled(getattr(contrib, name)())) for name in _split(_PLAIN_CONTRIB)},
    "adafactor": Case(lambda: optax.adafactor(_RATE, min_dim_size_to_factor=2)),
    "adaptive_grad_clip": Case(lambda: _scaled(optax.adaptive_grad_clip(0.1))),
    "add_noise": Case(lambda: _scaled(optax.add_noise(0.01, 0.55, key=1))),
    "apply_every": Case(lambda: _scaled(optax.apply_every(3))),
    "apply_if_finite": Case(lambda: optax.apply_if_finite(optax.adam(_RATE), 3)),
    "chain": Case(lambda: optax.chain(optax.clip(0.5), optax.adam(optax.linear_schedule(0.1, 0.01, 10)))),
    "clip": Case(lambda: _scaled(optax.clip(0.1))),
    "clip_by_block_rms": Case(lambda: _scaled(optax.clip_by_block_rms(0.1))),
    "clip_by_global_norm": Case(lambda: _scaled(optax.clip_by_global_norm(0.1))),
    "conditionally_mask": Case(lambda: optax.conditionally_mask(optax.adam(_RATE), _second_step)),
    "conditionally_transform": Case(
        lambda: _scaled(optax.conditionally_transform(optax.scale_by_adam(), lambda step, value: value > 1.0, True)),
        ("value",),
    ),
    "ema": Case(lambda: _scaled(optax.ema(0.9))),
    "flatten": Case(lambda: optax.flatten(optax.adam(_RATE))),
    "freeze": Case(lambda: optax.chain(optax.adam(_RATE), optax.freeze(False))),
    "inject_hyperparams": Case(lambda: optax.inject_hyperparams(optax.adam)(optax.exponential_decay(_RATE, 5, 0.5))),
    "inject_stateful_hyperparams": Case(lambda: optax.inject_stateful_hyperparams(optax.adam)(_RATE)),
    "lbfgs": Case(optax.lbfgs, SEARCH),
    "masked": Case(lambda: optax.masked(optax.adam(_RATE), _is_kernel)),
    "multi_transform": Case(lambda: optax.multi_transform(_BY_LABEL, _labels)),
    "named_chain": Case(lambda: optax.named_chain(("clip", optax.clip(0.5)), ("adam", optax.adam(_RATE)))),
    "noisy_sgd": Case(lambda: optax.noisy_sgd(_RATE, key=1)),
    "optimistic_adam": Case(lambda: optax.optimistic_adam(_RATE, optimism=_RATE)),
    "partition": Case(lambda: optax.partition(_BY_LABEL, _labels)),
    "polyak_sgd": Case(optax.polyak_sgd, ("value",)),
    "scale": Case(lambda: optax.scale(-_RATE)),
    "scale_by_backtracking_linesearch": Case(
        lambda: optax.chain(optax.sgd(1.0), optax.scale_by_backtracking_linesearch(15, store_grad=True)), SEARCH
    ),
    "scale_by_factored_rms": Case(lambda: _scaled(optax.scale_by_factored_rms(min_dim_size_to_factor=2))),
    "scale_by_polyak": Case(lambda: optax.chain(optax.sgd(1.0), optax.scale_by_polyak()), ("value",)),
    "scale_by_schedule": Case(lambda: optax.scale_by_schedule(optax.linear_schedule(-0.1, -0.01, 10))),
    "scale_by_zoom_linesearch": Case(lambda: optax.chain(optax.sgd(1.0), optax.scale_by_zoom_linesearch(15)), SEARCH),
    "selective_transform": Case(lambda: optax.selective_transform(optax.adam(_RATE), freeze_mask=_is_kernel)),
    "snapshot": Case(lambda: optax.chain(optax.snapshot("norm", optax.tree.norm), optax.sgd(_RATE))),
    "stateless": Case(lambda: optax.stateless(lambda updates, _: optax.tree.scale(-_RATE, updates))),
    "stateless_with_tree_map": Case(lambda: optax.stateless_with_tree_map(lambda g, p: -_RATE * g - 1e-3 * p)),
    "trace": Case(lambda: _scaled(optax.trace(0.9, nesterov=True))),
    "with_extra_args_support": Case(lambda: optax.with_extra_args_support(optax.sgd(_RATE))),
    "MultiSteps": Case(lambda: optax.MultiSteps(optax.adam(_RATE), every_k_schedule=2)),
    "contrib.differentially_private_aggregate": Case(
        lambda: _scaled(contrib.differentially_private_aggregate(0.5, 0.1, key=1)), by_example=True
    ),
    "contrib.dpsgd": Case(lambda: contrib.dpsgd(0.1, 0.5, 0.1, seed=1), by_example=True),
    "contrib.galore": Case(lambda: contrib.galore(_RATE, rank=2)),
    "contrib.dadapt_adamw": Case(lambda: contrib.dadapt_adamw(estim_lr0=_RATE)),
    "contrib.mechanize": Case(lambda: contrib.mechanize(optax.adam(_RATE), s_init=0.1)),
    "contrib.momo": Case(contrib.momo, ("value",)),
    "contrib.momo_adam": Case(contrib.momo_adam, ("value",)),
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
    "contrib.scale_by_galore": Case(lambda: _scaled(contrib.scale_by_galore(2))),
    "contrib.schedule_free": Case(lambda: contrib.schedule_free(optax.adam(_RATE, b1=0.0), _RATE)),
    "contrib.sophia": Case(lambda: contrib.sophia(_RATE), ("obj_fn",)),
    "contrib.hutchinson_estimator_diag_hessian": Case(
        lambda: _scaled(contrib.hutchinson_estimator_diag_hessian()), ("obj_fn",)
    ),
    "contrib.split_real_and_imaginary": Case(lambda: contrib.split_real_and_imaginary(optax.adam(_RATE))),
}

_UNIFORM = {*_split(_RATED), *_split(_PLAIN)} | {f"contrib.{name}" for name in _split(_RATED_CONTRIB + _PLAIN_CONTRIB)}
#: Cases that another case of their family covers too; they run on one Python version.
SIBLINGS = _UNIFORM - {*_split(_OF_EACH_FAMILY)}

#: Transformations without a case, and the reason.
LEFT_OUT = {
    "lookahead": "its parameters are a pair of fast and slow ones, and its gradients are of the fast ones alone",
    "monitor": "its update gives its state another structure than its init",
    "measure_with_ema": "what it gives are measurements and no updates; it stands inside of monitor",
    "contrib.scale_by_muon": "its parameters are matrices alone; contrib.muon has it inside",
}
