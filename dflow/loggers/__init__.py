"""Loggers: metrics of a run as curves in TensorBoard, Weights & Biases or MLflow, as a CSV file, or printed.

Each is a callback of a `Trainer`, and has `log(step, values)` for a loop by hand.
"""

from dflow.loggers.csv_logger import CSV
from dflow.loggers.mlflow_logger import MLflow
from dflow.loggers.print_logger import Print
from dflow.loggers.tensorboard_logger import TensorBoard
from dflow.loggers.wandb_logger import WandB

__all__ = ["CSV", "MLflow", "Print", "TensorBoard", "WandB"]
