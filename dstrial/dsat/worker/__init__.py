"""The living worker: its ranks measure one configuration after the other.

It is one ordinary experiment. Without torch.

A *supervisor* per slot is started by ``dstrial.launch`` and lives as long as the worker. It keeps one *rank*, the process
that trains (``dstrial.dsat.rank.rank_server``), and replaces it when necessary. The supervisor of rank 0 is
the *chief* too: it reads tasks, distributes them, and reports the results.
"""
