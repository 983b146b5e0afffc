"""Files that Python loads as modules of Determined, never by these names.

In processes that dstrial starts; see ``dstrial/determined_imports.py``.
"""
