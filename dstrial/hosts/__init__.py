"""Other machines: which ones, over ssh, and what is wrong with them."""
