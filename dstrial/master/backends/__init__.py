"""The processes of trials and commands: directories, environments, output, ends."""
