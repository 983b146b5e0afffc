"""The embedded master: one machine's server of Determined's protocol.

Nothing here imports torch, deepspeed, or the packages that train; trials are separate processes, and the
two halves meet over HTTP and in the experiment config only.
"""
