"""Run the real engine at any number of ranks on a CPU, without real memory.

``request`` says what is run, ``process.dry_run`` runs it in a process of its own, ``values`` holds what comes back; these three
import no torch. The rest runs inside that process.
"""
