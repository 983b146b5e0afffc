"""How often two machines say that they live, and when one counts as lost.

It is the same wherever hosts are used.
"""

BEAT_S = 1.0
"""How often either side says that it lives, seconds."""
SILENT_S = 5.0
"""After how long without a word a host is named as silent, seconds."""
LOST_S = 10.0
"""After how long without a word a host counts as lost, seconds."""
LEASE_S = 20.0
"""After how long without a word a host kills what it runs, seconds: longer than the other side waits for it."""
