"""Where measuring trials run: on this machine without a master, or as experiments of a master."""
