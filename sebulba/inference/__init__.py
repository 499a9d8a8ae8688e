"""Inference: Inferencer threads act and step environments, cycle by cycle."""
