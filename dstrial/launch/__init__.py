"""Start ranks on this machine or a Determined cluster; report the first failure.

Nothing is imported here, so that a rank does not import the launcher: ``local_ranks.run_ranks`` starts ranks.
"""
