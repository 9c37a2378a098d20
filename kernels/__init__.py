"""Fused operations of the model, each with a plain definition and a fast version. Knows tensors, nothing of atoms."""
