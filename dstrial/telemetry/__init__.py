"""Measure time, memory, throughput and FLOPs of every rank.

Errors in telemetry never end training, and telemetry does not change training's results.
"""
