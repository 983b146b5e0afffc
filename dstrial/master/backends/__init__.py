"""Run the processes of trials and commands, on this machine and on others."""
