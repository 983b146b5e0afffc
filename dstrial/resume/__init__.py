"""May this run go on here, and how: what a checkpoint says of its run, the rules, and where it is found."""

import dstrial.config  # noqa: F401  # the modules of each import the other's; this order is the one that ends
