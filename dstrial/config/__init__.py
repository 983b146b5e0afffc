"""Experiment config and DeepSpeed JSON: load, merge, solve the batch, check.

This package only reads files. It starts no process and never imports torch, deepspeed or determined.
"""
