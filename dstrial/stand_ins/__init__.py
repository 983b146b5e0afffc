"""Modules of dstrial that are imported under the names of Determined's modules.

``dstrial/determined_imports.py`` redirects these imports in processes that dstrial starts.
"""
