"""Load, merge and check experiment configs and DeepSpeed JSON; solve batch sizes.

This package only reads files. It starts no process and never imports torch, deepspeed or determined.
"""
