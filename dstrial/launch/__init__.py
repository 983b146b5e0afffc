"""Start ranks on this machine or a Determined cluster; report the first failure.

``local_ranks.run_ranks`` starts ranks. This file imports nothing, so that ranks do not import the launcher.
"""
