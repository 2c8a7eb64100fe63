"""Evaluation beside training, and the training loop with a schedule."""
