"""The better direction of a metric, smaller or larger, as far as its name tells."""

from __future__ import annotations

import re
from collections.abc import Iterable

from dflow.tracing.near_names import did_you_mean

#: Parts of names, also within longer words. Those of losses come first: `auc_loss` is one.
_SMALLER = ("loss", "error", "perplexity", "entropy", "regret", "distance", "deviance", "divergence", "residual")
_LARGER = ("accuracy", "auc", "auroc", "auprc", "precision", "recall", "reward", "likelihood", "correlation", "ndcg")
#: Whole words of names.
_SMALLER_WORDS = {"cost", "mae", "mse", "rmse", "mape", "nll", "ppl", "wer", "cer", "fid", "err", "bpc", "bpb", "brier"}
_LARGER_WORDS = {
    *("acc", "ap", "bleu", "correct", "dice", "elbo", "f1", "fbeta", "gain", "hit", "hits", "iou", "kappa", "lift"),
    *("map", "mcc", "miou", "mrr", "pr", "psnr", "r2", "return", "returns", "roc", "rouge", "score", "sensitivity"),
    *("specificity", "ssim", "success", "top1", "top5", "win", "wins"),
}


def mode_of(metric: str) -> str | None:
    """Return "min" or "max" for a metric, None if its name does not say which is better."""
    name = metric.lower()
    words = set(re.split(r"[^a-z0-9]+", re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", metric).lower())) | {name}
    if any(part in name for part in _SMALLER) or words & _SMALLER_WORDS:
        return "min"
    return "max" if any(part in name for part in _LARGER) or words & _LARGER_WORDS else None


def better(mode: str) -> str:
    """Return the words for a mode in messages."""
    return f"{'smaller' if mode == 'min' else 'larger'} is better"


def missing_metric(owner: str, metric: str, known: Iterable[str]) -> tuple[str, str]:
    """Return the fact and the remedy for a metric that the evaluation does not return."""
    names = sorted(known)
    return (
        f"{owner}: expected {metric!r} among the metrics of the evaluation, got {names}",
        did_you_mean(metric, names, "return it from the evaluation's step, or give another metric"),
    )
