"""The living worker: its ranks measure one configuration after the other.

It is one ordinary experiment. Without torch.

A *guardian* per slot is started by ``dstrial.launch`` and lives as long as the worker. It keeps one *rank*, the process
that trains (``dstrial.dsat.rank.rank_server``), and starts another one whenever that has to go. The guardian of rank 0 is
the *chief* too: it reads orders, tells all guardians, and gives the answers.
"""
