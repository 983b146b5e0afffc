"""Replacements for modules of Determined; imported only under Determined's names.

They are used in processes that dstrial starts; see ``dstrial/determined_imports.py``.
"""
