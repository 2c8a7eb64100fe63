"""Evaluation by several workers: each batch once, with the values of one moment."""
