"""May this run go on here, and how: its checkpoint, what that says, the rules."""

import dstrial.config  # noqa: F401  # the modules of each import the other's; this order is the one that ends
