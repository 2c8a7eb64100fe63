"""Exported functions served over HTTP, by the Open Inference Protocol v2."""
