"""Start programs as forks of a process that has imported torch and DeepSpeed.

A server (``server``) imports and forks idle processes, *spares*. A spare that its parent sends a program (``client``) checks that
a new process would import the same, takes on the program's state (``fork``) and runs it; otherwise it refuses, and the parent
starts a new process. ``key`` says which environments a server serves.

Standard library only, but for what the server is told to import.
"""
