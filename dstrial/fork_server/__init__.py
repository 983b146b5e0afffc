"""New processes as forks of one that has imported what they import.

``key`` says which processes may share one, ``client`` starts the server and asks it, ``server`` is its process, ``fork`` makes a
fork be what a new process would be, ``messages`` is what they say to each other.

Only the standard library, but for what the server is told to import.
"""
