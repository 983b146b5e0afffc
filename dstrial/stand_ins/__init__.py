"""What Python gives for modules of Determined in processes that dstrial starts; see ``dstrial/determined_imports.py``.

Not imported by these names: each file is loaded under Determined's.
"""
