"""Every undocumented name of DeepSpeed that dstrial reads, calls or replaces.

``engines`` has what belongs to engines and pipelines, ``optimizers`` what belongs to optimizers, their parameters and the classes
that they save, ``process`` what DeepSpeed keeps once per process.
Nothing else in dstrial imports a submodule of DeepSpeed beyond ``PUBLIC_MODULES``, reads an attribute of an engine that is
neither documented nor in ``engines.ATTRIBUTES``, or replaces anything in DeepSpeed. These modules import nothing of dstrial, so
that ``dstrial.ranks`` may use them too.

Not here, because they name no code of DeepSpeed's: keys of its config (tables in ``dstrial.config``), and its files and what is
in them (``dstrial.checkpoint.file_roles``, ``dstrial.engine.checkpoint_reader.saved_engine``). Words of its messages are in
``engines.REMEDIES``.

Another release is: its table of config keys (``tools/generate_deepspeed_rules.py``), these modules, and a run of
``tests/engine/test_deepspeed_internals.py``, which checks each name against the installed release. A line number is of 0.19.8.
"""

PUBLIC_MODULES = ("deepspeed", "deepspeed.accelerator", "deepspeed.comm", "deepspeed.pipe")
"""What DeepSpeed documents; anybody may import these, and use what they offer."""
