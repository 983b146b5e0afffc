"""The only access to undocumented names of DeepSpeed: reads, calls, replacements.

``engines`` covers engines and pipelines; ``optimizers`` covers optimizers, their parameters and the classes in their saved
state; ``process`` covers DeepSpeed's global state in a process. No other module of dstrial imports a submodule of DeepSpeed
beyond ``PUBLIC_MODULES``, reads a private attribute of an engine, or replaces anything in DeepSpeed. These modules import
nothing of dstrial, so that ``dstrial.ranks`` may use them too. DeepSpeed's config keys are in ``dstrial.config``; its
checkpoint files are read in ``dstrial.checkpoint.manifest`` and ``dstrial.engine.checkpoint_reader.saved_engine``.

To support another release of DeepSpeed: generate the release's table of config keys (``tools/generate_deepspeed_rules.py``),
update these modules, and run ``tests/engine``. Line numbers are of DeepSpeed 0.19.8.
"""

PUBLIC_MODULES = ("deepspeed", "deepspeed.accelerator", "deepspeed.comm", "deepspeed.pipe")
"""Documented modules of DeepSpeed, which any module of dstrial may import."""
