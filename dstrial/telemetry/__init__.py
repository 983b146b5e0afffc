"""Measure time, memory, speed and FLOPs of every rank.

Instruments never end training and change no result.
"""
