"""Exported functions served over HTTP and gRPC, by the Open Inference Protocol v2."""
